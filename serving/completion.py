"""What the device answered: tokens for those who wait for them, states for the cache, ends of sequences."""

from collections.abc import Callable

from serving.plan import DecodeRow, Plan, PrefillRow, RowResult, StepResult
from serving.request import Output
from serving.scheduler import Scheduler
from serving.sequence import Phase, Sequence


class Completion:
    """Applies the results of steps, in the order in which the steps were dispatched."""

    def __init__(self, scheduler: Scheduler, forget: Callable[[Sequence], None]) -> None:
        """`forget` is told of each sequence that has ended."""
        self._scheduler, self._forget = scheduler, forget

    def apply(self, plan: Plan, result: StepResult, now: int | float) -> list[Output]:
        """Outputs of the step, one for each sequence with news."""
        for row, finite in zip(plan.prefill, result.captures, strict=True):
            for capture, good in zip(row.captures, finite, strict=True):
                self._scheduler.holdings.settle(capture, good, now)
        rows = [*plan.prefill, *plan.decode]
        outputs = []
        for row, answer in zip(rows, [*result.prefill, *result.decode], strict=True):
            row.sequence.in_flight -= 1
            self._settle_length(row, answer)
            # A sequence that has ended meanwhile, or been told to, says nothing any more.
            if row.sequence.phase is not Phase.FINISHED:
                output = self._answer(row.sequence, answer, now)
                outputs += [] if output is None else [output]
        return outputs

    @staticmethod
    def _settle_length(row: PrefillRow | DecodeRow, answer: RowResult) -> None:
        """A step that may give several tokens has been counted in full; now it is known how many there were."""
        if isinstance(row, DecodeRow) and row.sequence.phase is Phase.DECODE and answer.tokens:
            missing = row.tokens - len(answer.tokens)
            row.sequence.length -= missing
            row.sequence.sampled -= missing

    def _answer(self, sequence: Sequence, answer: RowResult, now: int | float) -> Output | None:
        if not answer.finite:
            self._purge_source(sequence)
            error = f"the logits after token {sequence.known - 1} are not finite; the request cannot go on"
            return self.end(sequence, Output(sequence.request.id, [], [], sequence.final("error", now, error)))
        if not answer.tokens:
            return None
        if sequence.first_token < 0:
            sequence.first_token = now
        tokens = self._until_stop(sequence, answer.tokens)
        sequence.outputs.extend(tokens)
        self._scheduler.counters.output_tokens += len(tokens)
        output = Output(sequence.request.id, tokens, answer.logprobs[: len(tokens)])
        return self._finish(sequence, output, now)

    @staticmethod
    def _until_stop(sequence: Sequence, tokens: list[int]) -> list[int]:
        room = sequence.request.max_tokens - len(sequence.outputs)
        stop = next((at + 1 for at, token in enumerate(tokens) if token in sequence.request.stop_ids), room)
        return tokens[: min(stop, room)]

    def _finish(self, sequence: Sequence, output: Output, now: int | float) -> Output:
        """The output as it is, or with the final record if it ends the sequence."""
        stopped = output.tokens[-1] in sequence.request.stop_ids
        if not stopped and len(sequence.outputs) < sequence.request.max_tokens:
            return output
        if sequence.phase is Phase.DECODE:
            self._keep_end(sequence, now)
        final = sequence.final("stop" if stopped else "length", now)
        return self.end(sequence, Output(output.id, output.tokens, output.logprobs, final))

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
        options = self._scheduler.options
        retention = sequence.request.retention or options.retention
        fed = sequence.known - 1
        if options.prefix_caching and retention.decode_end and fed > 0:
            sequence.path.extend(sequence.ids(len(sequence.path), fed))
            end = self._scheduler.holdings.keep_end(sequence, fed, now)
            if end is not None and retention.supersede:
                source = [sequence.source.node] if sequence.source else []
                self._scheduler.cache.supersede([*source, *sequence.nodes], end)

    def _purge_source(self, sequence: Sequence) -> None:
        """A cached prefix that led to a NaN is not offered again."""
        if sequence.source is not None:
            self._scheduler.cache.purge(sequence.source.node, "non_finite")
