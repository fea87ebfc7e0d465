"""A scheduler for vLLM that makes the steps in which every running request decodes one token nearly free.

vLLM's own does the full work of serving for every token of every request; sampling a batch to its end needs almost
none of it. Here such steps touch a counter a request and fetch a block where a border is crossed, and a request's
tokens and log-probs leave once, at its end.

Trap: this reaches into vLLM's scheduler, so it serves the versions only that it was written against
(`vllm_engine.SCHEDULED_VERSIONS`); every other kind of step is the parent's, and what the short steps left undone is
made up for before (`_leave`).
"""

from collections.abc import Sequence
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec

from ratchet.engines.vllm_engine import LOG_PROBS

_REFILL_SHARE = 8
"""Waiting requests are let in when one in so many slots is free: one at a time, hardly any step would be short."""


class _Lane:
    """A request whose output is wanted at its end only, with what a decode step needs of it."""

    __slots__ = (
        "all_tokens",
        "append",
        "append_output",
        "computed",
        "end",
        "log_probs",
        "num_prompt_tokens",
        "request",
        "request_id",
        "stops",
    )

    def __init__(self, request: Any, max_model_len: int) -> None:
        params = request.sampling_params
        self.request = request
        self.request_id: str = request.request_id
        self.num_prompt_tokens: int = request.num_prompt_tokens
        self.all_tokens: list[int] = request._all_token_ids
        self.append = self.all_tokens.append
        self.append_output = request._output_token_ids.append
        self.stops = {*(params.stop_token_ids or ()), params.eos_token_id}
        self.end = min(self.num_prompt_tokens + request.max_tokens, max_model_len)
        """Tokens of the longest sequence that it may become."""
        self.log_probs: list[float] | None = None if params.num_logprobs is None else []
        self.computed = 0
        """Computed tokens, those in flight included; ahead of the request's own count while steps are short."""

    def write_back(self) -> None:
        """Bring the request's counters to where short steps have left it."""
        request = self.request
        request.num_computed_tokens = self.computed
        # A decoding request has one token that is not computed yet, beside those in flight.
        placeholders = self.computed + 1 - len(self.all_tokens)
        if hasattr(request, "num_in_flight_tokens"):
            request.num_in_flight_tokens += placeholders - request.num_output_placeholders
        request.num_output_placeholders = placeholders


class _DecodeStep(SchedulerOutput):
    """A short step, as of the `generation` of lanes that it was made from."""

    generation = -1


class DecodeScheduler(AsyncScheduler):
    """vLLM's scheduler with a short way for pure decode steps; in process, one client, text not wanted.

    Requests that want their output at the end, and no text, get one output with all tokens; all others are served as by
    the parent. `num_short_steps` counts the steps that went the short way.
    """

    finished_req_ids: set[str]
    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_short_steps = 0
        self._lanes: dict[str, _Lane] = {}
        self._decoding: list[_Lane] | None = None
        self._generation = 0
        self._plain_engine = self._is_plain_engine()
        if self._plain_engine:
            self._block_size: int = self.kv_cache_manager.coordinator.single_type_managers[0].block_size

    def _is_plain_engine(self) -> bool:
        groups = self.kv_cache_config.kv_cache_groups
        extras = (
            self.connector, self.ec_connector, self.lora_config, self.num_spec_tokens, self.is_encoder_decoder,
            self.finished_req_ids_dict is not None, self.log_stats, self.use_pp, self.defer_block_free,
            self.enable_kv_cache_events, self.needs_kv_cache_zeroing, self.max_num_encoder_input_tokens,
            self.dcp_world_size > 1, self.policy.value != "fcfs", self.num_sampled_tokens_per_step != 1,
            *(getattr(self, name, None) for name in (
                "aux_output_connector", "enable_return_routed_experts", "return_sampling_mask", "perf_metrics",
            )),
        )  # fmt: skip
        return not any(extras) and len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if self._plain_engine and _wants_its_end_only(request):
            self._lanes[request.request_id] = _Lane(request, self.max_model_len)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        self._leave()
        finished = super().finish_requests(*args, **kwargs)
        self._lanes = {name: lane for name, lane in self._lanes.items() if not lane.request.is_finished()}
        return finished

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        self._leave()
        return super().reset_prefix_cache(*args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        step = self._decode_step() if self._may_decode() else None
        if step is None:
            self._leave()
            return super().schedule(*args, **kwargs)
        self.num_short_steps += 1
        return step

    def _may_decode(self) -> bool:
        """Whether the parent would neither admit nor prefill anything, and nobody waits for single tokens."""
        if len(self._lanes) != len(self.requests) or not self._lanes or self._pause_state != PauseState.UNPAUSED:
            return False
        num_running, num_waiting = self.get_request_counts()
        # vLLM 0.32 may run fewer than it has slots for.
        most_running = getattr(self, "max_num_active_reqs", self.max_num_running_reqs)
        num_free = most_running - num_running
        if num_running == 0 or (num_waiting and num_free > 0 and num_free * _REFILL_SHARE >= most_running):
            return False
        if self._decoding is None:
            self._enter()
        return self._decoding is not None

    def _enter(self) -> None:
        if self._inflight_prefills or getattr(self, "reset_preempted_req_ids", None):
            return
        lanes = [self._lanes[request.request_id] for request in self.running]
        if not self.use_v2_model_runner and not self.prev_step_scheduled_req_ids.issuperset(
            lane.request_id for lane in lanes
        ):
            return
        for lane in lanes:
            request = lane.request
            late = getattr(request, "num_stale_output_tokens", 0) or getattr(request, "async_tokens_to_discard", 0)
            new = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
            if late or request.is_prefill_chunk or new != 1:
                return
            lane.computed = request.num_computed_tokens
        self._decoding = lanes

    def _leave(self) -> None:
        """Bring every request to where the parent would have it."""
        if self._decoding is None:
            return
        for lane in self._decoding:
            lane.write_back()
            lane.request.update_block_hashes()
        self._decoding = None
        self._generation += 1

    def _decode_step(self) -> SchedulerOutput | None:
        """The next token of every request that is not at its end; None, and nothing changed, where blocks run short."""
        assert self._decoding is not None
        # The token at the last place of a sequence is sampled and never computed.
        lanes = [lane for lane in self._decoding if lane.computed + 1 < lane.end]
        computed = [lane.computed for lane in lanes]
        crossing = [place for place, count in enumerate(computed) if count % self._block_size == 0]
        if len(crossing) > self.kv_cache_manager.block_pool.get_num_free_blocks():
            return None
        self.current_step += 1
        self.kv_cache_manager.new_step_starts()
        new_block_ids: list[Any] = [None] * len(lanes)
        for place in crossing:
            count = computed[place] + 1
            # The part of `allocate_slots` that fetches a block; those of decoded tokens are not offered to others.
            (blocks,) = self.kv_cache_manager.coordinator.allocate_new_blocks(lanes[place].request_id, count, count)
            new_block_ids[place] = ([block.block_id for block in blocks],) if blocks else None
        for lane in lanes:
            lane.computed += 1
        ids = [lane.request_id for lane in lanes]
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.clear()
            self.prev_step_scheduled_req_ids.update(ids)
        step = _DecodeStep(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=ids,
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=new_block_ids,
                num_computed_tokens=computed,
                num_output_tokens=[lane.computed - lane.num_prompt_tokens for lane in lanes],
            ),
            num_scheduled_tokens=dict.fromkeys(ids, 1),
            total_num_scheduled_tokens=len(ids),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[0],
            preempted_req_ids=set(),
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
        )
        step.generation = self._generation
        self.finished_req_ids = set()
        return step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not self._is_current(scheduler_output, model_runner_output):
            return self._held_back(super().update_from_output(scheduler_output, model_runner_output))
        log_probs = model_runner_output.logprobs
        values = None if log_probs is None else log_probs.logprobs[:, 0].tolist()
        lanes, ended = self._lanes, []
        rows = zip(model_runner_output.req_ids, model_runner_output.sampled_token_ids, strict=True)
        for row, (request_id, token_ids) in enumerate(rows):
            lane = lanes.get(request_id)
            if lane is None:
                continue  # it ended while this step was on its way
            token_id = token_ids[0]
            lane.append(token_id)
            lane.append_output(token_id)
            if lane.log_probs is not None:
                assert values is not None
                lane.log_probs.append(values[row])
            if (token_id in lane.stops or len(lane.all_tokens) >= lane.end) and check_stop(
                lane.request, self.max_model_len
            ):
                ended.append(lane)
        return {0: EngineCoreOutputs(outputs=self._ended(ended))} if ended else {}

    def _is_current(self, step: Any, output: Any) -> bool:
        """Whether the lanes are those that `step` was made from, and the runner reports single tokens and no more."""
        return (
            isinstance(step, _DecodeStep)
            and step.generation == self._generation
            and not (output.prompt_logprobs_dict or output.num_nans_in_logits or output.kv_connector_output)
            and set(map(len, output.sampled_token_ids)) <= {1}
            and (output.logprobs is None or len(output.logprobs.logprobs) == len(output.req_ids))
        )

    def _ended(self, lanes: Sequence[_Lane]) -> list[EngineCoreOutput]:
        outputs = []
        for lane in lanes:
            request = lane.request
            lane.write_back()
            output = EngineCoreOutput(
                request_id=lane.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
            )
            self._free_request(request)
            outputs.append(self._completed(lane, output))
        gone = {lane.request_id for lane in lanes}
        self.running = [request for request in self.running if request.request_id not in gone]
        self._drop_ended()
        return outputs

    def _held_back(self, outputs: dict[int, Any]) -> dict[int, Any]:
        """The parent's outputs without those of requests that want their end only, whose last one gets everything."""
        for each in outputs.values():
            kept = []
            for output in each.outputs:
                lane = self._lanes.get(output.request_id)
                if lane is None:
                    kept.append(output)
                    continue
                if output.new_logprobs is not None and lane.log_probs is not None:
                    lane.log_probs += output.new_logprobs.logprobs[:, 0].tolist()
                if output.finish_reason is not None:
                    kept.append(self._completed(lane, output))
            each.outputs = kept
        self._drop_ended()
        return outputs

    def _completed(self, lane: _Lane, output: EngineCoreOutput) -> EngineCoreOutput:
        output.new_token_ids = list(lane.request._output_token_ids)
        output.new_logprobs = None
        output.kv_transfer_params = {LOG_PROBS: lane.log_probs}
        del self._lanes[lane.request_id]
        return output

    def _drop_ended(self) -> None:
        if self._decoding is not None:
            self._decoding = [lane for lane in self._decoding if lane.request_id in self._lanes]


def _wants_its_end_only(request: Any) -> bool:
    params = request.sampling_params
    return (
        params is not None
        and params.output_kind == RequestOutputKind.FINAL_ONLY
        and not params.detokenize
        and params.num_logprobs in (None, 0)
        and params.prompt_logprobs is None
        and not params.min_tokens
        and getattr(params, "repetition_detection", None) is None
        and not (request.resumable or request.use_structured_output or request.lora_request or request.mm_features)
        and request.prompt_embeds is None
        and request.client_index == 0
    )
