"""From a frame to what it asks of a pool, and back: no socket, no clock."""

from triptych.core.errors import MessageError, TriptychError
from triptych.core.messages import Lend, Message, pack, unpack
from triptych.kvpool import protocol, runs
from triptych.kvpool.blocks import Publication, decode
from triptych.kvpool.locked import LockedPool


def answer(calls: LockedPool, frame: bytes) -> bytes:
    """Answer one frame; what goes wrong is part of the answer, and changes nothing."""
    try:
        return pack([ask(calls, unpack_question(frame))])
    except TriptychError as error:
        if isinstance(error, MessageError):
            calls.count("refused_frames")
        return pack([protocol.refusal(error)])


def unpack_question(frame: bytes) -> Message:
    """The one message of a frame.

    Raises: MessageError
    """
    questions = unpack(frame)
    if len(questions) != 1:
        raise MessageError(f"{len(questions)} messages in one frame: expected 1")
    return questions[0]


def ask(calls: LockedPool, asked: Message) -> Message:
    """Do what a message asks.

    Raises: what ``PoolCalls`` raise; MessageError if it is not a question
    """
    match asked:
        case protocol.RegisterWorker():
            return calls.register(asked.name, asked.process, asked.journal_bytes)
        case protocol.RenewWorker():
            return protocol.Renewed(lacking_pages=calls.renew(asked.worker))
        case protocol.GrantPages():
            ids = calls.grant(asked.worker, asked.pages, asked.at_least)
            return protocol.Granted(pages=runs.pack(ids))
        case protocol.GiveBackPages():
            calls.give_back(asked.worker, runs.unpack(asked.pages, calls.pages))
        case protocol.HandOff():
            commits = [(c.label, runs.unpack(c.pages, calls.pages)) for c in asked.commits]
            about, holds = [c.about for c in asked.commits], [c.hold for c in asked.commits]
            made = calls.handoff(
                asked.worker, commits, asked.releases, keep=asked.keep, about=about, holds=holds
            )
            return protocol.Claims(claims=tuple(made))
        case protocol.AttachLeases():
            wanted = [(w.claim, runs.unpack(w.pages, calls.pages)) for w in asked.wanted]
            return protocol.Claims(claims=tuple(calls.attach(asked.worker, wanted)))
        case protocol.ReleaseLeases():
            calls.release(asked.worker, asked.leases, keep=asked.keep)
        case protocol.WithdrawRequests():
            ended = calls.withdraw(asked.worker, asked.labels)
            return protocol.Withdrawn(leases=tuple(ended))
        case protocol.WithdrawAll():
            return protocol.Withdrawn(leases=tuple(calls.withdraw_all(asked.worker)))
        case protocol.UnregisterWorker():
            calls.unregister(asked.worker)
        case protocol.ExpelWorker():
            return protocol.Expelled(was_there=calls.expel(asked.name))
        case protocol.InheritFrom():
            return calls.inherit(asked.former)
        case protocol.AdoptRequest():
            ids = runs.unpack(asked.pages, calls.pages)
            claim = calls.adopt(asked.worker, asked.former, asked.label, asked.lease, ids)
            return protocol.Claims(claims=(claim,))
        case (
            protocol.FindPrefix()
            | protocol.HoldPrefix()
            | protocol.KnowPrefix()
            | protocol.PublishPrefix()
            | protocol.RestorePrefix()
            | protocol.KeepSession()
        ):
            return _answer_prefix(calls, asked)
        case protocol.ReleasePrefix():
            calls.release_prefix(asked.worker, asked.hold)
        case Lend():
            return calls.lend(asked.bytes)
        case protocol.StatPool():
            return calls.stat()
        case protocol.MapPages():
            return calls.map(asked.max_cells)
        case protocol.CheckPool():
            return protocol.Checked(faults=tuple(calls.check()))
        case _:
            raise MessageError(f"{type(asked).__name__} is not a question to the pool")
    return protocol.PoolDone()


def _answer_prefix(
    calls: LockedPool,
    asked: protocol.FindPrefix
    | protocol.HoldPrefix
    | protocol.KnowPrefix
    | protocol.PublishPrefix
    | protocol.RestorePrefix
    | protocol.KeepSession,
) -> Message:
    tokens = decode(asked.tokens)
    match asked:
        case protocol.FindPrefix():
            found = calls.find_prefix(asked.worker, asked.namespace, tokens)
            return protocol.PrefixFound.of(found)
        case protocol.HoldPrefix():
            found = calls.hold_prefix(asked.worker, asked.namespace, tokens)
            return protocol.PrefixFound.of(found)
        case protocol.KnowPrefix():
            blocks = calls.known_prefix(asked.worker, asked.namespace, tokens)
            return protocol.PrefixBlocks(blocks=blocks)
        case protocol.RestorePrefix():
            coming = calls.restore_prefix(asked.worker, asked.namespace, tokens, asked.tenant)
            return protocol.PrefixComing(blocks=coming.blocks, seconds=coming.seconds)
        case protocol.KeepSession():
            blocks = calls.keep_session(
                asked.worker, asked.namespace, tokens, asked.tenant, asked.session
            )
            return protocol.PrefixBlocks(blocks=blocks)
        case protocol.PublishPrefix():
            new = Publication(
                namespace=asked.namespace,
                tokens=tokens,
                blocks=[runs.unpack(packed, calls.pages) for packed in asked.blocks],
                seconds=asked.seconds,
                tenant=asked.tenant,
                formats=asked.formats,
            )
            return protocol.PrefixBlocks(blocks=calls.publish_prefix(asked.worker, new))
