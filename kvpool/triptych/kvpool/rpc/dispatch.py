"""Decodes a frame, makes the call of the pool, and encodes the reply: no socket, no clock."""

from triptych.core.errors import MessageError, TriptychError
from triptych.core.messages import BorrowCacheMemory, Message, pack, unpack
from triptych.kvpool.prefix.blocks import Publication, decode
from triptych.kvpool.rpc import messages, page_ranges
from triptych.kvpool.rpc.local_pool import LockedPool


def answer(calls: LockedPool, frame: bytes) -> bytes:
    """Answer one frame. An error becomes the answer, and the call has changed nothing."""
    try:
        return pack([ask(calls, unpack_question(frame))])
    except TriptychError as error:
        if isinstance(error, MessageError):
            calls.count("refused_frames")
        return pack([messages.refusal(error)])


def unpack_question(frame: bytes) -> Message:
    """The one message of a frame.

    Raises: MessageError
    """
    questions = unpack(frame)
    if len(questions) != 1:
        raise MessageError(f"{len(questions)} messages in one frame: expected 1")
    return questions[0]


def ask(calls: LockedPool, asked: Message) -> Message:
    """Make the call that a message asks for.

    Raises: what ``PoolCalls`` raise; MessageError if it is not a question
    """
    match asked:
        case messages.RegisterWorker():
            return calls.register(asked.name, asked.process, asked.checkpoint_bytes)
        case messages.RenewWorker():
            return messages.Renewed(lacking_pages=calls.renew(asked.worker))
        case messages.AllocatePages():
            ids = calls.allocate(asked.worker, asked.pages, asked.at_least)
            return messages.PagesAllocated(pages=page_ranges.pack(ids))
        case messages.FreePages():
            calls.free(asked.worker, page_ranges.unpack(asked.pages, calls.pages))
        case messages.HandOff():
            commits = [(c.label, page_ranges.unpack(c.pages, calls.pages)) for c in asked.commits]
            about, pins = [c.about for c in asked.commits], [c.pin for c in asked.commits]
            made = calls.handoff(
                asked.worker, commits, asked.releases, keep=asked.keep, about=about, pins=pins
            )
            return messages.LeaseRefs(lease_refs=tuple(made))
        case messages.AttachLeases():
            wanted = [(w.lease_ref, page_ranges.unpack(w.pages, calls.pages)) for w in asked.wanted]
            return messages.LeaseRefs(lease_refs=tuple(calls.attach(asked.worker, wanted)))
        case messages.ReleaseLeases():
            calls.release(asked.worker, asked.leases, keep=asked.keep)
        case messages.WithdrawRequests():
            ended = calls.withdraw(asked.worker, asked.labels)
            return messages.Withdrawn(leases=tuple(ended))
        case messages.WithdrawAll():
            return messages.Withdrawn(leases=tuple(calls.withdraw_all(asked.worker)))
        case messages.UnregisterWorker():
            calls.unregister(asked.worker)
        case messages.ExpelWorker():
            return messages.Expelled(was_there=calls.expel(asked.name))
        case messages.InheritFrom():
            return calls.inherit(asked.previous_worker)
        case messages.AdoptRequest():
            ids = page_ranges.unpack(asked.pages, calls.pages)
            lease_ref = calls.adopt(
                asked.worker, asked.previous_worker, asked.label, asked.lease, ids
            )
            return messages.LeaseRefs(lease_refs=(lease_ref,))
        case (
            messages.FindPrefix()
            | messages.PinPrefix()
            | messages.KnowPrefix()
            | messages.PublishPrefix()
            | messages.RestorePrefix()
            | messages.KeepSession()
        ):
            return _answer_prefix(calls, asked)
        case messages.ReleasePrefix():
            calls.release_prefix(asked.worker, asked.pin)
        case BorrowCacheMemory():
            return calls.borrow_cache_memory(asked.bytes)
        case messages.StatPool():
            return calls.stat()
        case messages.MapPages():
            return calls.map(asked.max_cells)
        case messages.CheckPool():
            return messages.Checked(faults=tuple(calls.check()))
        case _:
            raise MessageError(f"{type(asked).__name__} is not a question to the pool")
    return messages.PoolDone()


def _answer_prefix(
    calls: LockedPool,
    asked: messages.FindPrefix
    | messages.PinPrefix
    | messages.KnowPrefix
    | messages.PublishPrefix
    | messages.RestorePrefix
    | messages.KeepSession,
) -> Message:
    tokens = decode(asked.tokens)
    match asked:
        case messages.FindPrefix():
            found = calls.find_prefix(asked.worker, asked.namespace, tokens)
            return messages.PrefixFound.of(found)
        case messages.PinPrefix():
            found = calls.pin_prefix(asked.worker, asked.namespace, tokens)
            return messages.PrefixFound.of(found)
        case messages.KnowPrefix():
            blocks = calls.known_prefix(asked.worker, asked.namespace, tokens)
            return messages.PrefixBlocks(blocks=blocks)
        case messages.RestorePrefix():
            coming = calls.restore_prefix(asked.worker, asked.namespace, tokens, asked.tenant)
            return messages.PrefixComing(blocks=coming.blocks, seconds=coming.seconds)
        case messages.KeepSession():
            blocks = calls.keep_session(
                asked.worker, asked.namespace, tokens, asked.tenant, asked.session
            )
            return messages.PrefixBlocks(blocks=blocks)
        case messages.PublishPrefix():
            new = Publication(
                namespace=asked.namespace,
                tokens=tokens,
                blocks=[page_ranges.unpack(packed, calls.pages) for packed in asked.blocks],
                seconds=asked.seconds,
                tenant=asked.tenant,
                formats=asked.formats,
            )
            return messages.PrefixBlocks(blocks=calls.publish_prefix(asked.worker, new))
