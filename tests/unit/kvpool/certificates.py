"""Certificates for tests: an authority, and what it signed."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from triptych.core.config import NetworkConfig


def make_certificates(directory: Path, name: str = "one", **settings: str) -> NetworkConfig:
    """A new authority with one certificate for 127.0.0.1 and ``triptych.test``, in PEM files."""
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = _certificate(f"authority {name}", authority_key, f"authority {name}", authority_key)
    leaf = _certificate(f"node {name}", key, f"authority {name}", authority_key)
    files = {"tls_cert_file": leaf, "tls_ca_file": authority}
    paths = dict[str, str]()
    for setting, certificate in files.items():
        path = directory / f"{name}-{setting}.pem"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        paths[setting] = str(path)
    path = directory / f"{name}-key.pem"
    pem, raw = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    path.write_bytes(key.private_bytes(pem, raw, serialization.NoEncryption()))
    return NetworkConfig(**{**paths, "tls_key_file": str(path), **settings})


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, issuer: str, signer: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    def named(common: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    now = datetime.now(UTC)
    names = [x509.DNSName("triptych.test"), x509.IPAddress(ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(named(name))
        .issuer_name(named(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=key is signer, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer, hashes.SHA256())
    )
