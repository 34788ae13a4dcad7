"""Settings of connections between nodes."""

from dataclasses import dataclass

from triptych.core.config.values import require


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkConfig:
    """Authentication and encryption between nodes. With one node, nothing listens on the
    network."""

    token_file: str = ""
    """File with the secret that processes of different nodes present to each other, at least 16
    characters, at the same path on every node; empty: a new one at each start."""

    tls_cert_file: str = ""
    """PEM certificate of each node's server; empty: no TLS between nodes."""

    tls_key_file: str = ""
    """PEM private key of the certificate."""

    tls_ca_file: str = ""
    """PEM certificates of the authorities that sign node certificates; a peer without a certificate
    signed by one of them is refused."""

    tls_server_name: str = ""
    """Server name in the certificates; empty: the IP address of each node."""

    def __post_init__(self) -> None:
        files = (self.tls_cert_file, self.tls_key_file, self.tls_ca_file)
        together = "all three files, or none of them"
        require(all(files) or not any(files), "network.tls_{cert,key,ca}_file", files, together)
        if self.tls_server_name:
            name = self.tls_server_name
            require(all(files), "network.tls_server_name", name, "tls_cert_file beside it")
