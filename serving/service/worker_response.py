"""Outputs of the engine as messages of `vllm.grpc.engine`."""

import dataclasses
from collections.abc import Sequence

from smg_grpc_proto import vllm_engine_pb2 as worker

from serving.request import Alternatives, Final, Output, PromptLogprobs


@dataclasses.dataclass(eq=False, slots=True)
class Choice:
    """What has been said in one choice."""

    index: int
    prompt: Sequence[int]
    wants_logprobs: bool
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: worker.OutputLogProbs = dataclasses.field(default_factory=worker.OutputLogProbs)
    prompt_logprobs: worker.InputLogProbs | None = None
    cached_tokens: int = 0
    _message: worker.GenerateResponse = dataclasses.field(init=False, default_factory=worker.GenerateResponse)
    """Filled anew for each chunk: making one takes longer than all the rest of a chunk."""

    def __post_init__(self) -> None:
        self._message.chunk.index = self.index
        self._message.chunk.prompt_tokens = len(self.prompt)

    def chunk(self, output: Output) -> bytes:
        """The output as a piece of the stream, serialized."""
        said = self.take(output)
        chunk = self._message.chunk
        chunk.token_ids[:] = output.tokens
        chunk.completion_tokens = len(self.tokens)
        chunk.cached_tokens = self.cached_tokens
        if said is not None:
            chunk.output_logprobs.CopyFrom(said)
        if output.prompt_logprobs is None or self.prompt_logprobs is None:
            return self._message.SerializeToString()
        chunk.input_logprobs.CopyFrom(self.prompt_logprobs)
        message = self._message.SerializeToString()
        chunk.ClearField("input_logprobs")
        return message

    def take(self, output: Output) -> worker.OutputLogProbs | None:
        """Keeps the output for the end; gives its log-probabilities, if asked for."""
        self.tokens += output.tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = input_logprobs(self.prompt, output.prompt_logprobs)
        if not self.wants_logprobs:
            return None
        said = output_logprobs(output.tokens, output.logprobs, output.top_logprobs)
        self.logprobs.MergeFrom(said)
        return said

    def complete(self, final: Final) -> bytes:
        """The end of the choice, serialized."""
        message = worker.GenerateComplete(
            output_ids=self.tokens,
            finish_reason=final.finish_reason,
            prompt_tokens=final.prompt_tokens,
            completion_tokens=len(self.tokens),
            cached_tokens=final.cached_tokens,
            index=self.index,
            spec_draft_tokens=final.drafted_tokens,
            spec_accepted_tokens=final.accepted_tokens,
        )
        if self.wants_logprobs:
            message.output_logprobs.CopyFrom(self.logprobs)
        if self.prompt_logprobs is not None:
            message.input_logprobs.CopyFrom(self.prompt_logprobs)
        if isinstance(final.matched, str):
            message.matched_stop_str = final.matched
        elif final.matched is not None:
            message.matched_token_id = final.matched
        return worker.GenerateResponse(complete=message).SerializeToString()


def output_logprobs(
    tokens: Sequence[int], logprobs: Sequence[int | float], top: Sequence[Alternatives] | None
) -> worker.OutputLogProbs:
    """Log-probabilities of sampled tokens and of their alternatives."""
    return worker.OutputLogProbs(
        token_logprobs=logprobs, token_ids=tokens, top_logprobs=[_top(alternatives) for alternatives in top or ()]
    )


def input_logprobs(prompt: Sequence[int], said: PromptLogprobs) -> worker.InputLogProbs:
    """Log-probabilities of the prompt; the first token has none."""
    values = [
        worker.InputTokenLogProb() if value is None else worker.InputTokenLogProb(value=value)
        for value in said.logprobs
    ]
    return worker.InputLogProbs(token_logprobs=values, token_ids=prompt, top_logprobs=[_top(top) for top in said.top])


def _top(alternatives: Alternatives | None) -> worker.TopLogProbs:
    if alternatives is None:
        return worker.TopLogProbs()
    return worker.TopLogProbs(values=alternatives.logprobs, token_ids=alternatives.tokens)
