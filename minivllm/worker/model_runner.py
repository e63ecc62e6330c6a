"""Prepares each step for the model: rows, positions, slots, metadata; runs it in a forward context; samples.

The runner owns the batch and the block tables, and nothing of the caches: those live on the layers, bound by name.
Mirrors `vllm/v1/worker/gpu_model_runner.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minivllm.attention.backend import AttentionBackend, AttentionMetadata, AttentionMetadataBuilder
from minivllm.attention.batch_split import reorder_batch_to_split_decodes_and_prefills
from minivllm.attention.layer_base import AttentionLayerBase
from minivllm.attention.metadata import CommonAttentionMetadata
from minivllm.config import VllmConfig
from minivllm.core.kv_cache_interface import KVCacheConfig, KVCacheSpec
from minivllm.core.scheduler_output import SchedulerOutput
from minivllm.forward_context import BatchDescriptor, collect_layers, set_forward_context
from minivllm.models.loader import load_model
from minivllm.outputs import ModelRunnerOutput
from minivllm.sampling.sampler import Sampler
from minivllm.worker.block_table import CpuGpuBuffer
from minivllm.worker.input_batch import CachedRequestState, InputBatch
from minivllm.worker.memory import allocate_kv_cache, bind_kv_cache, find_kv_sharing
from minivllm.worker.prompt_logprobs import PromptLogprobsCollector


@dataclass(slots=True, kw_only=True)
class AttentionGroup:
    """Layers of one KV-cache group that one metadata builder serves.

    Mirrors: vllm/v1/worker/utils.py AttentionGroup.
    """

    backend: type[AttentionBackend]
    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    num_heads: int
    builder: AttentionMetadataBuilder[Any]


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """What one step feeds the model and the sampler, apart from attention.

    Mirrors: none; vLLM keeps these as local variables of `execute_model`.
    """

    input_ids: Tensor  # [padded num_tokens] int32
    positions: Tensor  # [padded num_tokens] int64
    num_scheduled: np.ndarray  # [num_reqs] int32
    query_start_loc: np.ndarray  # [num_reqs + 1] int32
    sampling_rows: np.ndarray  # rows whose known tokens are all computed after this step


class ModelRunner:
    """Runs the model on what the scheduler decided.

    Mirrors: vllm/v1/worker/gpu_model_runner.py GPUModelRunner.
    Leaves out: pipeline and context parallelism, speculation, multimodal encoders, pooling, LoRA.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.device = torch.device(vllm_config.device)
        self.vocab_size: int = vllm_config.model_config.hf_config.vocab_size
        self.sampler = Sampler(seed=vllm_config.model_config.seed)
        self.layers: dict[str, AttentionLayerBase] = {}
        self.requests: dict[str, CachedRequestState] = {}
        self.attn_groups: list[list[AttentionGroup]] = []  # one list a KV-cache group
        self.prompt_logprobs = PromptLogprobsCollector()

        tokens, seqs = self.max_num_tokens, vllm_config.scheduler_config.max_num_seqs
        self._input_ids = CpuGpuBuffer(tokens, dtype=torch.int32, device=self.device)
        self._positions = CpuGpuBuffer(tokens, dtype=torch.int64, device=self.device)
        self._query_start_loc = CpuGpuBuffer(seqs + 1, dtype=torch.int32, device=self.device)
        self._seq_lens = CpuGpuBuffer(seqs, dtype=torch.int32, device=self.device)
        self._num_computed = torch.zeros(seqs, dtype=torch.int32)
        self._arange = np.arange(max(tokens, seqs), dtype=np.int64)

    @property
    def max_num_tokens(self) -> int:
        """The most tokens of one step."""
        return self.vllm_config.scheduler_config.max_num_batched_tokens

    def load_model(self, model: nn.Module | None = None) -> None:
        """Load the configured model, or take one that is loaded, and learn which of its layers keep a cache."""
        self.model: Any = (load_model(self.vllm_config) if model is None else model).eval()
        self.layers = collect_layers(self.model)
        self.kv_sharing = find_kv_sharing(self.layers, self.vllm_config)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """What each layer keeps; layers that keep nothing of their own are absent."""
        specs = {name: layer.get_kv_cache_spec(self.vllm_config) for name, layer in self.layers.items()}
        return {name: spec for name, spec in specs.items() if spec is not None}

    @torch.inference_mode()
    def profile_run(self) -> None:
        """Run the largest possible step with no cache and no metadata: neither exists yet (vLLM #14309)."""
        seqs = min(self.vllm_config.scheduler_config.max_num_seqs, self.max_num_tokens)
        input_ids = torch.zeros(self.max_num_tokens, dtype=torch.int32, device=self.device)
        positions = torch.arange(self.max_num_tokens, device=self.device)
        positions %= self.vllm_config.model_config.max_model_len
        shape = BatchDescriptor(num_tokens=self.max_num_tokens)
        with set_forward_context(None, layers=self.layers, batch_descriptor=shape, is_profile_run=True):
            hidden = self.model(input_ids, positions)
        self.sampler.profile(self.model.compute_logits(hidden[:seqs]))

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the pages, hand them to the layers, and build a block table and the builders for each group."""
        scheduler_config = self.vllm_config.scheduler_config
        self.kv_cache_config = kv_cache_config
        views = allocate_kv_cache(kv_cache_config, self.layers, self.device)
        views.update({name: views[target] for name, target in self.kv_sharing.items()})
        bind_kv_cache(views, self.layers)
        self.input_batch = InputBatch(
            max_num_reqs=scheduler_config.max_num_seqs,
            max_model_len=self.vllm_config.model_config.max_model_len,
            max_num_batched_tokens=self.max_num_tokens,
            device=self.device,
            vocab_size=self.vocab_size,
            block_sizes=[group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
        )
        self.requests.clear()
        self.attn_groups = [
            list(self._attention_groups(group.layer_names)) for group in kv_cache_config.kv_cache_groups
        ]

    def _attention_groups(self, layer_names: tuple[str, ...]) -> Iterator[AttentionGroup]:
        """Layers of one KV-cache group and those that read their pages, split where backend, spec or number of query
        heads differ."""
        specs = self.kv_cache_config.layer_specs()
        sharing = {name: target for name, target in self.kv_sharing.items() if target in layer_names}
        members: dict[tuple[type[AttentionBackend], KVCacheSpec, int], list[str]] = {}
        for name in (*layer_names, *sharing):
            layer, spec = self.layers[name], specs[sharing.get(name, name)]
            members.setdefault((layer.get_attn_backend(), spec, layer.num_heads), []).append(name)
        for (backend, spec, heads), names in members.items():
            builder = backend.get_builder_cls()(spec, names, self.vllm_config, self.device)
            yield AttentionGroup(
                backend=backend, layer_names=names, kv_cache_spec=spec, num_heads=heads, builder=builder
            )

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute every scheduled token; sample one token for each request that has no uncomputed tokens left."""
        if scheduler_output.new_block_ids_to_zero:
            blocks = torch.tensor(scheduler_output.new_block_ids_to_zero, device=self.device)
            for name in self.kv_cache_config.layer_specs():
                self.layers[name].kv_cache.index_fill_(0, blocks, 0)
        self._update_states(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput(req_ids=[], sampled_token_ids=[])
        inputs = self._prepare_inputs(scheduler_output)
        attn_metadata, slot_mapping = self._build_attention_metadata(inputs)
        shape = BatchDescriptor(num_tokens=inputs.input_ids.shape[0])
        with set_forward_context(attn_metadata, layers=self.layers, slot_mapping=slot_mapping, batch_descriptor=shape):
            hidden = self.model(inputs.input_ids, inputs.positions)
        return self._sample(hidden, inputs)

    def _update_states(self, scheduler_output: SchedulerOutput) -> None:
        """Bring the persistent batch in line with the scheduler: who left, who came, who got blocks."""
        batch, scheduled = self.input_batch, scheduler_output.num_scheduled_tokens
        for req_id in scheduler_output.finished_req_ids:
            self.requests.pop(req_id, None)
            self.prompt_logprobs.forget(req_id)
            batch.remove_request(req_id)  # even if it is scheduled: then the id names another request by now
        # A preempted or unscheduled request loses its row but not its state: it may come back.
        for req_id in [req_id for req_id in batch.req_ids if req_id not in scheduled]:
            batch.remove_request(req_id)

        arrivals: list[CachedRequestState] = []
        for new in scheduler_output.scheduled_new_reqs:
            state = CachedRequestState(
                req_id=new.req_id, prompt_token_ids=new.prompt_token_ids, sampling_params=new.sampling_params,
                generator=self.sampler.generator_for(new.sampling_params, self.device),
                block_ids=tuple(list(ids) for ids in new.block_ids), num_computed_tokens=new.num_computed_tokens,
                eos_token_id=new.eos_token_id,
            )  # fmt: skip
            self.requests[new.req_id] = state
            arrivals.append(state)
        cached = scheduler_output.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            state = self.requests[req_id]
            state.num_computed_tokens = cached.num_computed_tokens[index]
            new_blocks = cached.new_block_ids[index]
            if req_id in cached.resumed_req_ids:
                # Its old blocks were freed when it was preempted: the new ids replace them all (vLLM #46595).
                if new_blocks is None:
                    raise RuntimeError(f"request {req_id} was resumed without block ids")
                state.block_ids = tuple(list(ids) for ids in new_blocks)
            elif new_blocks is not None:
                for ids, more in zip(state.block_ids, new_blocks, strict=True):
                    ids.extend(more)
            row = batch.req_id_to_index.get(req_id)
            if row is None:
                arrivals.append(state)
                continue
            batch.num_computed_tokens_cpu[row] = state.num_computed_tokens
            if new_blocks is not None:
                batch.block_table.append_row(new_blocks, row)
        for state in arrivals:
            batch.add_request(state)
        batch.condense()
        builders = [group.builder for groups in self.attn_groups for group in groups]
        thresholds = [most for each in builders if (most := each.reorder_batch_threshold) is not None]
        if thresholds:
            reorder_batch_to_split_decodes_and_prefills(batch, scheduler_output, min(thresholds))

    def _prepare_inputs(self, scheduler_output: SchedulerOutput) -> StepInputs:
        """Token ids and positions of every scheduled token, request by request, written into the persistent buffers."""
        batch = self.input_batch
        num_reqs = batch.num_reqs
        num_scheduled = np.fromiter(
            (scheduler_output.num_scheduled_tokens[req_id] for req_id in batch.req_ids), np.int32, num_reqs
        )
        computed = batch.num_computed_tokens_cpu[:num_reqs]
        query_start_loc = self._query_start_loc.np[: num_reqs + 1]
        np.cumsum(num_scheduled, out=query_start_loc[1:])
        total = int(query_start_loc[-1])
        padded = min(pad_num_tokens(total), self.max_num_tokens)
        # rows:      [0 0 0 1 2 2]  which request a token belongs to
        # positions: computed tokens of the request + the token's place among those scheduled now
        rows = np.repeat(self._arange[:num_reqs], num_scheduled)
        positions = self._positions.np[:total]
        np.subtract(self._arange[:total], query_start_loc[rows], out=positions)
        positions += computed[rows]
        self._input_ids.np[:total] = batch.token_ids_cpu[rows, positions]
        self._input_ids.np[total:padded] = self._positions.np[total:padded] = 0
        self._num_computed.numpy()[:num_reqs] = computed
        seq_lens = self._seq_lens.np[:num_reqs]
        np.add(computed, num_scheduled, out=seq_lens)
        batch.block_table.commit_block_table(num_reqs)
        batch.block_table.compute_slot_mapping(num_reqs, query_start_loc, positions)
        return StepInputs(
            input_ids=self._input_ids.copy_to_gpu(padded),
            positions=self._positions.copy_to_gpu(padded),
            num_scheduled=num_scheduled,
            query_start_loc=query_start_loc,
            sampling_rows=np.flatnonzero(seq_lens >= batch.num_tokens[:num_reqs]),
        )

    def _build_attention_metadata(self, inputs: StepInputs) -> tuple[dict[str, AttentionMetadata], dict[str, Tensor]]:
        """One CommonAttentionMetadata a KV-cache group, one entry a layer, one build() an attention group; where groups
        differ by nothing but their block table, one build() for all of them, if their builder can re-point it."""
        num_reqs, num_tokens = len(inputs.num_scheduled), int(inputs.query_start_loc[-1])
        query_start_loc = self._query_start_loc.copy_to_gpu(num_reqs + 1)
        seq_lens, seq_lens_cpu = self._seq_lens.copy_to_gpu(num_reqs), self._seq_lens.cpu[:num_reqs]
        max_query_len, max_seq_len = int(inputs.num_scheduled.max()), int(seq_lens_cpu.max())
        metadata: dict[str, AttentionMetadata] = {}
        slots: dict[str, Tensor] = {}
        first_built: dict[tuple[type[AttentionBackend], KVCacheSpec, int], AttentionMetadata] = {}
        for index, groups in enumerate(self.attn_groups):
            table = self.input_batch.block_table[index]
            common = CommonAttentionMetadata(
                query_start_loc=query_start_loc, query_start_loc_cpu=self._query_start_loc.cpu[: num_reqs + 1],
                seq_lens=seq_lens, seq_lens_cpu=seq_lens_cpu, num_computed_tokens_cpu=self._num_computed[:num_reqs],
                num_reqs=num_reqs, num_actual_tokens=num_tokens, max_query_len=max_query_len, max_seq_len=max_seq_len,
                block_table_tensor=table.get_device_tensor(num_reqs),
                slot_mapping=table.slot_mapping[: len(inputs.input_ids)],
            )  # fmt: skip
            for group in groups:
                key = (group.backend, group.kv_cache_spec, group.num_heads)
                if key in first_built and group.builder.supports_update_block_table:
                    table_of_group = (common.block_table_tensor, common.slot_mapping)
                    built = group.builder.update_block_table(first_built[key], *table_of_group)
                else:
                    built = group.builder.build(common_prefix_len=0, common_attn_metadata=common)
                    first_built[key] = built
                for name in group.layer_names:
                    metadata[name] = built
                    slots[name] = common.slot_mapping
        return metadata, slots

    def _sample(self, hidden: Tensor, inputs: StepInputs) -> ModelRunnerOutput:
        """hidden: [num_tokens, hidden_size]. Rows with uncomputed tokens left are never sampled."""
        batch, rows = self.input_batch, inputs.sampling_rows
        req_ids = batch.req_ids
        result = ModelRunnerOutput(
            req_ids=req_ids,
            sampled_token_ids=[[] for _ in req_ids],
            prompt_logprobs=self.prompt_logprobs.collect(batch, inputs.query_start_loc, hidden, self.model),
        )
        if not len(rows):
            return result
        # [len(rows)]: the last token of each request that is sampled
        logits_indices = torch.zeros(pad_num_tokens(len(rows)), dtype=torch.int64)
        logits_indices.numpy()[: len(rows)] = inputs.query_start_loc[1:][rows] - 1
        logits = self.model.compute_logits(hidden[logits_indices.to(self.device)])[: len(rows)]  # [., vocab_size]
        output = self.sampler(logits, batch.sampling_metadata(rows))
        for row, token in zip(rows.tolist(), output.sampled_token_ids.tolist(), strict=True):
            result.sampled_token_ids[row].append(token)
            batch.append_token(row, token)
        if output.logprobs is not None:
            asked = [batch.state(row).sampling_params.logprobs for row in rows.tolist()]
            result.logprobs = [None] * len(req_ids)
            for row, entry in zip(rows.tolist(), output.logprobs.to_dicts(asked), strict=True):
                result.logprobs[row] = None if entry is None else [entry]
        return result


def pad_num_tokens(num_tokens: int) -> int:
    """The size a step is padded to. Every size that a matrix product meets costs memory and time once, for kernels
    made for it: so large steps come in few sizes, at most an eighth of them padding."""
    step = 1 << max(0, num_tokens.bit_length() - 4)
    return -(-num_tokens // step) * step
