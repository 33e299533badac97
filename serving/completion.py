"""What the device answered: tokens for those who wait for them, states for the cache, ends of sequences."""

from collections.abc import Callable

from serving.following import Follower, Verdict
from serving.plan import DecodeRow, Plan, RowResult, StepResult
from serving.request import Alternatives, Final, Output
from serving.scheduler import Scheduler
from serving.sequence import Phase, Sequence


class Completion:
    """Applies the results of steps, in the order in which the steps were dispatched."""

    def __init__(self, scheduler: Scheduler, forget: Callable[[Sequence], None], follower: Follower) -> None:
        """`forget` is told of each sequence that has ended; `follower` asks constraints and stop checkers."""
        self._scheduler, self._forget, self._follower = scheduler, forget, follower

    def apply(self, plan: Plan, result: StepResult, now: int | float) -> list[Output]:
        """Outputs of the step, one for each sequence with news."""
        for row, finite in zip(plan.prefill, result.captures, strict=True):
            for capture, good in zip(row.captures, finite, strict=True):
                self._scheduler.holdings.settle(capture, good, now)
        outputs: list[Output] = []
        for row, answer in zip(plan.prefill, result.prefill, strict=True):
            sequence = row.sequence
            sequence.in_flight -= 1
            if answer.prompt is not None:
                sequence.prompt.extend(answer.prompt)
            self._hear(sequence, answer, now, outputs)
        for row, answer in zip(plan.decode, result.decode, strict=True):
            sequence = row.sequence
            sequence.in_flight -= 1
            if row.tokens > 1 and answer.tokens:
                self._settle_length(row, answer)
            if not (sequence.plain and sequence.phase is Phase.DECODE and self._goes_on(sequence, answer, outputs)):
                self._hear(sequence, answer, now, outputs)
        return outputs

    def _goes_on(self, sequence: Sequence, answer: RowResult, outputs: list[Output]) -> bool:
        """The shortest way for what nearly all answers are: tokens, and not the last ones. False for any other."""
        tokens, said = answer.tokens, sequence.outputs
        if not (tokens and answer.finite) or len(said) + len(tokens) >= sequence.max_tokens:
            return False
        if not sequence.stops.isdisjoint(tokens):
            return False
        said.extend(tokens)
        self._scheduler.counters.output_tokens += len(tokens)
        outputs.append(Output(sequence.id, tokens, answer.logprobs))
        return True

    def _hear(self, sequence: Sequence, answer: RowResult, now: int | float, outputs: list[Output]) -> None:
        # A sequence that has ended meanwhile, or been told to, says nothing any more.
        if sequence.phase is not Phase.FINISHED:
            output = self._answer(sequence, answer, now)
            if output is not None:
                outputs.append(output)

    @staticmethod
    def _settle_length(row: DecodeRow, answer: RowResult) -> None:
        """A step that may give several tokens has been counted in full; now it is known how many there were."""
        sequence, missing = row.sequence, row.tokens - len(answer.tokens)
        sequence.drafted += row.tokens - 1
        sequence.accepted += len(answer.tokens) - 1
        if sequence.phase is Phase.DECODE:
            sequence.length -= missing
            sequence.sampled -= missing

    def _answer(self, sequence: Sequence, answer: RowResult, now: int | float) -> Output | None:
        if not answer.finite:
            self._purge_source(sequence)
            error = f"the logits after token {sequence.known - 1} are not finite; the request cannot go on"
            return self.end(sequence, Output(sequence.request.id, [], [], sequence.final("error", now, error)))
        tokens = answer.tokens
        if not tokens:
            return None
        if sequence.first_token < 0:
            sequence.first_token = now
        if len(tokens) > 1:
            tokens = self._until_stop(sequence, tokens)
        verdict = None
        if sequence.followed:
            verdict = self._follower.follow(sequence, tokens)
            tokens = tokens[: verdict.tokens]
        output = self._output(sequence, tokens, answer)
        if verdict is not None and verdict.ends:
            exact = not sequence.in_flight and len(tokens) == len(answer.tokens)
            return self._end_as_told(sequence, output, verdict, exact, now)
        return self._finish(sequence, output, now)

    def _output(self, sequence: Sequence, tokens: list[int], answer: RowResult) -> Output:
        sequence.outputs.extend(tokens)
        self._scheduler.counters.output_tokens += len(tokens)
        request = sequence.request
        logprobs = answer.logprobs if len(tokens) == len(answer.logprobs) else answer.logprobs[: len(tokens)]
        if request.logprobs is None and request.prompt_logprobs is None:
            return Output(request.id, tokens, logprobs)
        return Output(
            request.id, tokens, logprobs, None, _top(sequence, answer, len(tokens)), sequence.prompt_logprobs()
        )

    @staticmethod
    def _until_stop(sequence: Sequence, tokens: list[int]) -> list[int]:
        room, stops = sequence.request.max_tokens - len(sequence.outputs), sequence.stops
        stop = next((at + 1 for at, token in enumerate(tokens) if token in stops), room) if stops else room
        return tokens[: min(stop, room)]

    def _finish(self, sequence: Sequence, output: Output, now: int | float) -> Output:
        """The output as it is, or with the final record if it ends the sequence."""
        last = output.tokens[-1]
        stopped = last in sequence.stops
        if not stopped and len(sequence.outputs) < sequence.request.max_tokens:
            return output
        self._keep_end(sequence, now)
        final = sequence.final("stop" if stopped else "length", now, matched=last if stopped else None)
        return self.end(sequence, _ending(output, final))

    def _end_as_told(
        self, sequence: Sequence, output: Output, verdict: Verdict, exact: bool, now: int | float
    ) -> Output:
        """Ends a sequence by word of the host: the device does not know, and may have gone on."""
        if verdict.error is not None:
            return self.end(sequence, _ending(output, sequence.final("error", now, verdict.error)))
        if exact:
            self._keep_end(sequence, now)
        return self.end(sequence, _ending(output, sequence.final("stop", now, matched=verdict.matched)))

    def end(self, sequence: Sequence, output: Output) -> Output:
        """Takes the sequence out with its last output."""
        assert output.final is not None
        self._scheduler.drop(sequence)
        sequence.phase = Phase.FINISHED
        self._scheduler.counters.finished[output.final.finish_reason] += 1
        self._forget(sequence)
        return output

    def _keep_end(self, sequence: Sequence, now: int | float) -> None:
        """Leaves the final state to the next turn. The last token was sampled and never fed."""
        options, request = self._scheduler.options, sequence.request
        retention = request.retention or options.retention
        fed = sequence.known - 1
        kept = options.prefix_caching and retention.decode_end and fed > 0
        if kept and sequence.phase is Phase.DECODE:
            sequence.path.extend(sequence.ids(len(sequence.path), fed))
            end = self._scheduler.holdings.keep_end(sequence, fed, now)
            if end is not None and retention.supersede:
                source = [sequence.source.node] if sequence.source else []
                self._scheduler.cache.supersede([*source, *sequence.nodes], end)
            if end is not None:
                sequence.nodes.append(end)
        if request.pin_seconds:
            nodes = sequence.nodes or ([sequence.source.node] if sequence.source else [])
            self._scheduler.cache.pin(nodes, now, now + request.pin_seconds, request.session)

    def _purge_source(self, sequence: Sequence) -> None:
        """A cached prefix that led to a NaN is not offered again."""
        if sequence.source is not None:
            self._scheduler.cache.purge(sequence.source.node, "non_finite")


def _top(sequence: Sequence, answer: RowResult, tokens: int) -> list[Alternatives] | None:
    count = sequence.request.logprobs
    if count is None:
        return None
    known = answer.top or [Alternatives([], [])] * tokens
    return [Alternatives(best.tokens[:count], best.logprobs[:count]) for best in known[:tokens]]


def _ending(output: Output, final: Final) -> Output:
    """`output` with the final record."""
    return Output(output.id, output.tokens, output.logprobs, final, output.top_logprobs, output.prompt_logprobs)
