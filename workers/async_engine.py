"""An engine on a thread of its own, with asynchronous streams around it.

Callers hand requests over through a queue and read their outputs from streams; only the engine's
thread touches the engine. After each step the outputs of all requests reach each event loop in
one call. A stream whose consumer is slow merges what has accumulated into one output.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING

import msgspec

from pageray.cluster.config import EngineConfig
from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.errors import EngineDeadError, InvalidParameterError
from pageray.cluster.generation import GenerateRequest, RequestOutput, SequenceOutput
from pageray.cluster.ids import BlockKey, RequestId
from pageray.cluster.member_spec import MemberSpec
from pageray.cluster.pull_counters import PullCounters
from pageray.cluster.sampling_params import SamplingParams
from pageray.workers.engine import Engine, EngineStats, ResolvedEngineConfig
from pageray.workers.page_service.prefill_job import PrefillJob
from pageray.workers.ranks.launcher import RankLauncher

if TYPE_CHECKING:
    from pageray.workers.cluster_membership import ClusterMembership

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0
"""An idle engine looks at its ranks and its invariants this often."""

_Command = Callable[[], None]


class _Stream:
    """The outputs of one request on their way to one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._ready = asyncio.Event()
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None

    def put(self, output: RequestOutput | Exception) -> None:
        """Called on `loop`."""
        if isinstance(output, Exception):
            self._error = output
        else:
            self._outputs.append(output)
        self._ready.set()

    async def get(self) -> RequestOutput:
        """Everything that has come since the last call, as one output.

        Raises what `put` was given as an error, after the outputs before it.
        """
        await self._ready.wait()
        outputs, self._outputs = self._outputs, []
        if self._error is None:
            self._ready.clear()
        elif not outputs:
            raise self._error
        return merge_outputs(outputs)


class _PrefillJob:
    """See `prefill_job.PrefillJob`."""

    def __init__(self, request_id: RequestId, cancel: Callable[[], None]) -> None:
        self.request_id = request_id
        self.is_over = False
        self.num_cached_tokens = 0
        self._cancel = cancel

    def cancel(self) -> None:
        self._cancel()


class AsyncEngine:
    """Starts the engine's thread at once; `shutdown` ends it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[RequestId, _Stream] = {}
        self._prefills: dict[RequestId, _PrefillJob] = {}
        self._prefill_numbers = itertools.count(1)
        self._death: EngineDeadError | None = None
        self._is_stopping = False
        self._membership: ClusterMembership | None = None
        self._thread = threading.Thread(target=self._run, name="pageray-engine", daemon=True)
        self._thread.start()

    @classmethod
    def start(cls, config: EngineConfig, *, launcher: RankLauncher | None = None) -> "AsyncEngine":
        """Build an engine (`Engine.start`) and run it. Blocks until it can serve."""
        return cls(Engine.start(config, launcher))

    @property
    def found(self) -> ResolvedEngineConfig:
        return self._engine.found

    @property
    def vocab_size(self) -> int:
        return self.found.limits.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.found.limits.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.found.limits.eos_token_ids

    @property
    def block_size(self) -> int:
        return self.found.limits.block_size

    @property
    def root_key(self) -> BlockKey:
        return self.found.root_key

    @property
    def capacity_tokens(self) -> int:
        return self.found.limits.capacity_tokens

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        """The request's outputs, at most one per engine step; the last one `is_finished`.

        Raises `ClientError` before the first item for a request that can never be served, and
        `EngineDeadError` when the engine is or goes down. Closing or cancelling the iterator
        aborts the request.
        """
        self.check_health()
        self._engine.check_request(request)
        if request.request_id in self._streams:
            raise InvalidParameterError(
                f"Request id {request.request_id!r} is already being served.", param="request_id"
            )
        stream = _Stream(asyncio.get_running_loop())
        self._streams[request.request_id] = stream
        is_finished = False
        try:
            num_fresh_tokens = 0
            if self._membership is not None:
                num_fresh_tokens = await self._membership.prefetch(request)
            self._commands.put(lambda: self._engine.add(request))
            while not is_finished:
                output = await stream.get()
                is_finished = output.is_finished
                yield _without_hits(output, num_fresh_tokens)
        finally:
            del self._streams[request.request_id]
            if not is_finished:
                self._commands.put(lambda: self._abort(request.request_id))

    def start_prefill(self, request: GenerateRequest) -> PrefillJob:
        """See `PrefillRunner.start`; any thread may call it."""
        self.check_health()
        number = next(self._prefill_numbers)
        prefill = msgspec.structs.replace(
            request,
            request_id=RequestId(f"{request.request_id}.prefill{number}"),
            prompt_token_ids=request.known_token_ids,
            sampling=SamplingParams(max_tokens=1, temperature=0.0),
            resumed=(),
        )
        self._engine.check_request(prefill)
        job = _PrefillJob(
            prefill.request_id, lambda: self._commands.put(lambda: self._end_prefill(job))
        )
        self._prefills[prefill.request_id] = job
        self._commands.put(lambda: self._engine.add(prefill))
        return job

    def finish_sequence(self, request_id: RequestId, index: int) -> None:
        """End one of a request's sequences early, because its stop string was found.

        No further output may come for it; when it was the last, close the request's iterator.
        """
        self._commands.put(lambda: self._finish(request_id, index))

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine cannot serve any more."""
        if self._death is not None:
            raise self._death
        if self._is_stopping:
            raise EngineDeadError("The engine has been shut down.")
        self._engine.check_alive()

    async def stats(self) -> EngineStats:
        """A look at the engine as it is now."""
        self.check_health()
        return self._engine.stats()

    async def join(self, spec: MemberSpec) -> EngineInfo:
        """Share pages with the other engines of an application from now on; call it once.

        Raises as `ClusterMembership.join` does, and the engine goes on alone.
        """
        # Imported here: offline engines have no use for Ray.
        from pageray.workers.cluster_membership import ClusterMembership

        self._membership = await ClusterMembership.join(
            self._engine, spec, check_health=self.check_health, prefills=self
        )
        return self._membership.info

    @property
    def pull_counters(self) -> PullCounters:
        """All 0 for an engine that has joined no cluster."""
        return PullCounters() if self._membership is None else self._membership.counters

    def shutdown(self) -> None:
        """End all requests, the thread and the ranks. Safe to call twice, from any thread."""
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.close()
        self._is_stopping = True
        self._commands.put(lambda: None)
        self._thread.join()

    # --- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._take_commands()
                self._deliver(self._engine.step())
        except Exception as error:  # the thread's boundary: every stream must hear of it
            logger.exception("the engine died")
            self._death = (
                error
                if isinstance(error, EngineDeadError)
                else EngineDeadError(f"The engine failed: {type(error).__name__}: {error}")
            )
        finally:
            self._engine.shutdown()
            reason = self._death or EngineDeadError("The engine has been shut down.")
            for job in list(self._prefills.values()):
                job.is_over = True
            for stream in list(self._streams.values()):
                _call_on(stream.loop, stream.put, reason)

    def _take_commands(self) -> None:
        """Run what callers have asked for; with nothing to compute, wait for it."""
        while not self._engine.has_requests and not self._is_stopping:
            try:
                self._commands.get(timeout=IDLE_CHECK_S)()
            except queue.Empty:
                self._engine.check_alive()
                self._engine.check_invariants()
        while not self._commands.empty():
            self._commands.get()()

    def _abort(self, request_id: RequestId) -> None:
        self._engine.abort(request_id)

    def _end_prefill(self, job: _PrefillJob) -> None:
        if not job.is_over:
            self._engine.abort(job.request_id)
        job.is_over = True
        self._prefills.pop(job.request_id, None)

    def _finish(self, request_id: RequestId, index: int) -> None:
        self._engine.finish_sequence(request_id, index)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Wake each event loop once, with everything that is for it."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, RequestOutput]]] = {}
        for output in outputs:
            job = self._prefills.get(output.request_id)
            if job is not None:
                job.num_cached_tokens = output.num_cached_tokens
                job.is_over = True
            stream = self._streams.get(output.request_id)
            if stream is not None:
                by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, deliveries in by_loop.items():
            _call_on(loop, _put_all, deliveries)


def _without_hits(output: RequestOutput, num_tokens: int) -> RequestOutput:
    """Tokens that another engine has just computed for this request are no hits of it."""
    if num_tokens == 0:
        return output
    num_cached = max(0, output.num_cached_tokens - num_tokens)
    return msgspec.structs.replace(output, num_cached_tokens=num_cached)


def merge_outputs(outputs: list[RequestOutput]) -> RequestOutput:
    """Several outputs of one request as one, in order. `outputs` is not empty."""
    if len(outputs) == 1:
        return outputs[0]
    by_index: dict[int, list[SequenceOutput]] = {}
    for output in outputs:
        for sequence in output.sequences:
            by_index.setdefault(sequence.index, []).append(sequence)
    last = outputs[-1]
    return RequestOutput(
        request_id=last.request_id,
        sequences=tuple(_merge_sequence(parts) for parts in by_index.values()),
        num_prompt_tokens=last.num_prompt_tokens,
        num_cached_tokens=last.num_cached_tokens,
        is_finished=last.is_finished,
    )


def _merge_sequence(parts: list[SequenceOutput]) -> SequenceOutput:
    last = parts[-1]
    return SequenceOutput(
        index=last.index,
        position=parts[0].position,
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
    )


def _put_all(deliveries: list[tuple[_Stream, RequestOutput]]) -> None:
    for stream, output in deliveries:
        stream.put(output)


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: object) -> None:
    """Run `function` on another thread's loop; a loop that is closed has no readers left."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:
        logger.debug("an output was dropped: its event loop is closed")
