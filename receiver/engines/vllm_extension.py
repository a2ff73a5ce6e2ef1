"""What runs inside vLLM's workers, loaded by its own options, where an operator wants one call and a probe.

::

    python -m vllm.entrypoints.openai.api_server … \
        --worker-extension-cls receiver.engines.vllm_extension.DeltastoreWorker \
        --weight-transfer-config '{"backend": "deltastore"}'

and ``--engine-option extension=yes`` for the receiver. vLLM imports this module; the receiver never does. It keeps to
what the workers of the V1 engine share, whatever runs the model there. (With the second option the server's own
``/update_weights`` takes a checkpoint's path too; without it the extension reloads as ``reload_weights`` does.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

__all__ = ["CheckpointTransfer", "DeltastoreWorker"]

_BACKEND = "deltastore"


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM is not there when types are checked
    """Nothing has to be agreed on: what is transferred lies on a disk that every worker sees."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # as above
    """The directory of a complete checkpoint."""

    checkpoint: str


class CheckpointTransfer(WeightTransferEngine):  # type: ignore[misc]  # as above
    """vLLM's ``deltastore`` backend for weight transfers: the weights come from a checkpoint directory."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: each update is whole."""

    def finish_weight_update(self) -> None:
        """Do nothing: each update is whole."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load a checkpoint over the weights that are there, as the server did when it started."""
        from vllm.model_executor.model_loader.reload.inplace import reload_weights  # noqa: PLC0415 - needs a platform

        reload_weights(
            self.vllm_config,
            self.model,
            weights_iterator=None,
            weights_path=update_info.checkpoint,
            is_checkpoint_format=True,
        )

    def shutdown(self) -> None:
        """Do nothing: there is no connection."""


if _BACKEND not in WeightTransferEngineFactory._registry:  # noqa: SLF001 - registering twice is an error there
    WeightTransferEngineFactory.register_engine(_BACKEND, CheckpointTransfer)


class DeltastoreWorker:
    """What vLLM's worker class inherits from besides its own base: methods for ``/collective_rpc``."""

    _deltastore_label: str | None = None

    def deltastore_load(self, checkpoint: str, label: str) -> dict[str, str]:
        """Load a checkpoint, and remember under which label; forgotten first, so that a failure leaves none."""
        worker: Any = self
        self._deltastore_label = None
        if worker.weight_transfer_engine is not None:
            worker.start_weight_update()
            worker.update_weights({"checkpoint": checkpoint})
            worker.finish_weight_update()
        else:
            worker.reload_weights(weights_path=checkpoint)
        worker.synchronize_device()
        self._deltastore_label = label
        return {"label": label}

    def deltastore_label(self) -> dict[str, str | None]:
        """Tell the label of the weights that this worker loaded last, whole."""
        return {"label": self._deltastore_label}

    def deltastore_probe(self, prompt: list[int]) -> dict[str, list[Any]]:
        """Run a prompt past the scheduler; return, for each of its positions, the likeliest next token.

        Log-probabilities are decimal strings, since JSON knows no NaN. The keys and values go into block 0 of the
        cache, which vLLM gives to no request; so a prompt has to fit one block. Ranks without logits return nothing.
        """
        worker: Any = self
        with torch.inference_mode(), set_current_vllm_config(worker.vllm_config):
            logits = _logits(worker, prompt)
        if logits is None:
            return {"tokens": [], "logprobs": []}
        likeliest = torch.log_softmax(logits.float(), dim=-1).max(dim=-1)
        return {"tokens": likeliest.indices.tolist(), "logprobs": [repr(value) for value in likeliest.values.tolist()]}


def _logits(worker: Any, prompt: list[int]) -> torch.Tensor | None:
    parallel = worker.vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise RuntimeError("the probe knows no pipeline stages: start the receiver without extension=yes")
    model, device, count = worker.get_model(), worker.device, len(prompt)
    positions = torch.arange(count, dtype=torch.int64, device=device)
    attention, slots = _attention(worker.model_runner, positions)
    with set_forward_context(attention, worker.vllm_config, num_tokens=count, slot_mapping=slots, skip_compiled=True):
        hidden = model(
            input_ids=torch.tensor(prompt, dtype=torch.int32, device=device),
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=None,
        )
    logits: torch.Tensor | None = model.compute_logits(hidden[0] if isinstance(hidden, tuple) else hidden)
    return logits


def _attention(runner: Any, positions: torch.Tensor) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Describe one sequence in block 0 to every attention layer."""
    count, device = len(positions), positions.device
    starts = torch.tensor([0, count], dtype=torch.int32)
    lengths = torch.tensor([count], dtype=torch.int32)
    attention: dict[str, Any] = {}
    slots: dict[str, torch.Tensor] = {}
    for group in (group for groups in runner.attn_groups for group in groups):
        if count > group.kv_cache_spec.block_size:
            raise RuntimeError(f"the probe's {count} tokens do not fit a block of {group.kv_cache_spec.block_size}")
        common = CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=lengths.to(device),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=count,
            block_table_tensor=torch.zeros((1, 1), dtype=torch.int32, device=device),
            slot_mapping=positions,
            positions=positions,
            is_prefilling=torch.ones(1, dtype=torch.bool),
        )
        made = group.get_metadata_builder().build(common_prefix_len=0, common_attn_metadata=common)
        attention |= dict.fromkeys(group.layer_names, made)
        slots |= dict.fromkeys(group.layer_names, positions)
    return attention, slots
