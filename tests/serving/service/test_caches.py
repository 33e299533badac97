"""The caches in the open: router events, inspection, sessions, export and import, flush."""

import hashlib
import io
import zipfile

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as worker
from smg_grpc_proto.generated import common_pb2 as shared

import serving
from serving.events import Removed, Stored
from serving.service.kv_events import BlockTree, block_hash
from tests.serving.fake_runner import solo


def digest(*tokens):
    return hashlib.sha256(repr(tokens).encode()).digest()


def stored(tokens, start=0, unit=2):
    """The event for a prefix of whole units after a reusable one of `start` tokens."""
    units = tuple(digest(*tokens[: end + unit]) for end in range(start, len(tokens), unit))
    parent = digest(*tokens[:start]) if start else None
    return Stored(units[-1], parent, start, len(tokens), "device", units, tuple(tokens[start:]))


class Router:
    """What a router makes of the events."""

    def __init__(self):
        self.blocks, self.sequence = {}, None

    def take(self, batch):
        if batch.HasField("snapshot"):
            self.blocks = {} if batch.snapshot.index == 0 else self.blocks
        else:
            assert batch.sequence_number == self.sequence + 1
        self.sequence = batch.sequence_number
        for event in batch.events:
            self.apply(event)

    def apply(self, event):
        kind = event.WhichOneof("data")
        if kind == "cleared":
            self.blocks = {}
        elif kind == "removed":
            for name in event.removed.block_hashes:
                del self.blocks[name]
        else:
            parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
            assert parent is None or parent in self.blocks
            for block in event.stored.blocks:
                assert block.block_hash not in self.blocks
                assert len(block.token_ids) == block.block_size
                self.blocks[block.block_hash] = (parent, tuple(block.token_ids))
                parent = block.block_hash

    def prefixes(self):
        """The token sequences of all blocks, from the root."""

        def whole(name):
            parent, tokens = self.blocks[name]
            return (*(whole(parent) if parent is not None else ()), *tokens)

        return {whole(name) for name in self.blocks}


def test_blocks_stay_while_a_reusable_prefix_needs_them():
    tree, router = BlockTree(2), Router()
    long, branch = (1, 2, 3, 4, 5, 6), (1, 2, 9, 9)
    for event in (stored(long), stored(branch), stored((*long, 7, 8), 6)):
        for change in tree.store(event):
            router.apply(change)
    assert router.prefixes() == {(1, 2), (1, 2, 3, 4), long, (*long, 7, 8), branch}
    for gone, left in (
        (long, {(1, 2), (1, 2, 3, 4), long, (*long, 7, 8), branch}),
        (branch, {(1, 2), (1, 2, 3, 4), long, (*long, 7, 8)}),
        ((*long, 7, 8), set()),
    ):
        for change in tree.remove(Removed(digest(*gone), len(gone), "device", "memory")):
            router.apply(change)
        assert router.prefixes() == left


def test_a_snapshot_lists_parents_first():
    tree, router = BlockTree(2), Router()
    for event in (stored((1, 2, 3, 4)), stored((1, 2, 5, 6)), stored((7, 8))):
        tree.store(event)
    for piece in tree.snapshot():
        for change in piece:
            router.apply(change)
    assert router.prefixes() == {(1, 2), (1, 2, 3, 4), (1, 2, 5, 6), (7, 8)}
    assert block_hash(b"\xff" * 32) == -1


def test_a_subscriber_knows_what_can_be_reused(start):
    """Whatever is announced is in the tree with a state at or below it; new subscribers start with all of it."""
    running = start(cache={"slots": 9})
    early, router = running.worker.SubscribeKvEvents(shared.SubscribeKvEventsRequest()), Router()
    router.take(next(early))
    for n in range(12):
        list(running.client.generate([n % 3, 1, 2, n, 4, 5, 6], max_tokens=5))
    running.books_balance()

    late = running.worker.SubscribeKvEvents(shared.SubscribeKvEventsRequest())
    fresh = Router()
    fresh.take(next(late))
    while router.sequence < fresh.sequence:
        router.take(next(early))
    assert router.blocks == fresh.blocks
    assert fresh.blocks
    for tokens in fresh.prefixes():
        answer = running.client.inspect([*tokens, 0])
        assert answer.reach >= len(tokens)
    running.client.flush()
    while router.blocks:
        router.take(next(early))
    assert running.client.inspect([0, 1, 2, 0, 4, 5, 6]).cached_tokens == 0
    resumed = running.worker.SubscribeKvEvents(shared.SubscribeKvEventsRequest(start_sequence_number=router.sequence))
    assert next(resumed).sequence_number == router.sequence
    for call in (early, late, resumed):
        call.cancel()


def test_a_silent_cache_still_tells_the_load(start, monkeypatch):
    from serving.service import kv_events

    monkeypatch.setattr(kv_events, "HEARTBEAT_SECONDS", 0.05)
    call = start().worker.SubscribeKvEvents(shared.SubscribeKvEventsRequest())
    first, second, third = next(call), next(call), next(call)
    call.cancel()
    assert first.HasField("snapshot")
    for record in (second, third):
        assert record.load.load_only
        assert (record.sequence_number, len(record.events)) == (first.sequence_number, 0)
        assert record.load.max_running_requests == 4
    assert third.load.sample > second.load.sample


def test_inspection_changes_nothing_and_tells_what_a_request_would_find(ids_only):
    prompt = [30, 31, 32, 33, 34, 35, 36]
    assert ids_only.client.inspect(prompt).cached_tokens == 0
    list(ids_only.client.generate(prompt, max_tokens=3))
    before = ids_only.client.inspect(prompt)
    assert (before.cached_tokens, before.prompt_tokens) == (6, 7)
    assert [state.tokens for state in before.states][-1] == 6
    assert ids_only.client.generate(prompt, max_tokens=3).result.usage["cached_tokens"] == 6
    assert ids_only.client.inspect(prompt, salt="tenant").cached_tokens == 0


def test_a_session_keeps_its_prefix(start):
    running = start(cache={"slots": 10})
    first = running.client.generate([1, 2, 3, 4, 5], max_tokens=4, session="talk", return_token_ids=True).result
    for n in range(30):
        list(running.client.generate([n, 7, n, 8, n], max_tokens=4))
    turn = [1, 2, 3, 4, 5, *first.token_ids[:-1], 9]
    assert running.client.inspect(turn).cached_tokens >= 4
    assert running.client.release("talk")
    assert not running.client.release("talk")


def test_flush_waits_for_requests_as_the_protocol_says(start):
    running = start(seconds=0.003)
    call = running.worker.Generate(
        worker.GenerateRequest(
            tokenized=worker.TokenizedInput(input_ids=[1, 2, 3]),
            sampling_params=worker.SamplingParams(max_tokens=40, ignore_eos=True),
            stream=True,
        )
    )
    next(call)
    refused = running.worker.FlushCache(shared.FlushCacheRequest())
    assert not refused.success
    assert "in flight" in refused.message
    assert running.worker.FlushCache(shared.FlushCacheRequest(timeout_s=5)).success


def test_a_state_goes_from_one_server_to_another(start):
    """The other server computes only what is new, and says the same as one that has computed everything."""
    here, there = start(), start()
    prompt = [4, 8, 15, 16, 23, 42, 7]
    list(here.client.generate(prompt, max_tokens=3))
    chunks = here.client.export_state(prompt)
    assert there.client.import_state(chunks) == 6
    result = there.client.generate(prompt, max_tokens=9, ignore_eos=True, return_token_ids=True).result
    assert result.usage["cached_tokens"] == 6
    assert list(result.token_ids) == solo(prompt, 9)
    there.books_balance()


def test_states_that_do_not_fit_are_refused_and_leave_nothing(start):
    here, there = start(), start(cache={"page_size": 8})
    prompt = [4, 8, 15, 16, 23, 42, 7]
    list(here.client.generate(prompt, max_tokens=3))
    chunks = here.client.export_state(prompt)
    with pytest.raises(serving.ServiceError, match="page") as refused:
        there.client.import_state(chunks)
    assert refused.value.code is grpc.StatusCode.FAILED_PRECONDITION
    broken = type(chunks[0])(total_bytes=chunks[0].total_bytes, data=chunks[0].data[:-3] + b"abc")
    here.client.flush()
    with pytest.raises(serving.ServiceError):
        here.client.import_state([broken])
    with pytest.raises(serving.ServiceError, match="ended early"):
        here.client.import_state([type(chunks[0])(total_bytes=10**6, data=b"x")])
    with pytest.raises(serving.ServiceError, match="nothing of this prompt"):
        here.client.export_state(prompt)
    here.books_balance()
    there.books_balance()


def test_the_tokenizer_comes_as_an_archive(with_text):
    chunks = list(with_text.worker.GetTokenizer(shared.GetTokenizerRequest()))
    archive = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks][-1] == hashlib.sha256(archive).hexdigest()
    names = zipfile.ZipFile(io.BytesIO(archive)).namelist()
    assert {"tiktoken.model", "tokenizer_config.json", "config.json"} <= set(names)


def test_a_server_without_a_tokenizer_has_none_to_give(ids_only):
    with pytest.raises(grpc.RpcError, match="no tokenizer") as refused:
        list(ids_only.worker.GetTokenizer(shared.GetTokenizerRequest()))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_information_and_loads(ids_only):
    info = ids_only.worker.GetModelInfo(worker.GetModelInfoRequest())
    assert (info.vocab_size, info.max_context_length, info.supports_vision) == (50, 400, False)
    assert list(info.eos_token_ids) == [49]
    server = ids_only.worker.GetServerInfo(worker.GetServerInfoRequest())
    assert (server.max_num_seqs, server.data_parallel_size, server.block_size) == (4, 1, 2)
    (load,) = ids_only.worker.GetLoads(worker.GetLoadsRequest()).loads
    assert load.max_running_requests == 4
    assert 0 <= load.token_usage <= 1
    assert ids_only.worker.GetLoads(worker.GetLoadsRequest(dp_rank=3)).loads == []
    model = ids_only.client.model()
    assert (model.has_tokenizer, model.max_length, model.prefix_match_unit) == (False, 400, 2)
    assert ids_only.client.stats()["slots_capacity"] == 23


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", worker.EmbedRequest(request_id="e")),
        ("StartProfile", shared.StartProfileRequest()),
        ("StopProfile", shared.StopProfileRequest()),
    ],
)
def test_what_is_not_served_is_refused_by_name(ids_only, method, request_):
    with pytest.raises(grpc.RpcError, match=method) as refused:
        getattr(ids_only.worker, method)(request_)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_async_client(with_text):
    import asyncio

    async def talk():
        async with serving.AsyncClient(with_text.address) as client:
            stream = client.generate("def f", max_tokens=4, return_token_ids=True)
            pieces = [piece async for piece in stream]
            result = await stream.result()
            assert "".join(piece.text for piece in pieces) == result.text
            assert await client.health() == "SERVING"
            assert (await client.model()).has_tokenizer
            assert (await client.stats())["requests"] > 0
            assert (await client.inspect("def f")).prompt_tokens == result.usage["prompt_tokens"]
            with pytest.raises(serving.ServiceError, match="prompt is empty"):
                await client.generate([]).result()
            return await client.abort("nobody")

    assert asyncio.run(talk()) == []


def test_the_async_client_has_the_same_names():
    def names(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    assert names(serving.AsyncClient) == names(serving.Client)
    assert names(serving.client.AsyncStream) == names(serving.client.Stream)
