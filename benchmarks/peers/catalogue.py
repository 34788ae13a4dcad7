"""The peers by the names of the command line."""

from collections.abc import Sequence

from benchmarks.peers import hf_transformers, llama, openvino, triptych_server, vllm
from benchmarks.peers.peer import Peer
from triptych.core.errors import ConfigError

PEERS: dict[str, tuple[Peer, ...]] = {
    "openvino": openvino.SERVERS,
    "llama": llama.SERVERS,
    "vllm": vllm.SERVERS,
    "transformers": hf_transformers.SERVERS,
    "fp16-pages": (triptych_server.FP16_PAGES,),
}


def servers_named(peers: Sequence[str], topologies: Sequence[str]) -> list[Peer]:
    """The servers of some peers, and Triptych in some topologies.

    Raises: ConfigError if there is none of a name
    """
    ours: dict[str, Peer] = dict(
        zip(triptych_server.TOPOLOGIES, triptych_server.SERVERS, strict=True)
    )
    for name in set(peers) - set(PEERS):
        raise ConfigError(f"peer {name!r}: expected one of {', '.join(PEERS)}")
    for name in set(topologies) - set(ours):
        raise ConfigError(f"topology {name!r}: expected one of {', '.join(ours)}")
    return [*(server for name in peers for server in PEERS[name]), *(ours[t] for t in topologies)]
