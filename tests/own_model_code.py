"""What a checkpoint folder brings along as code of its own: tests copy this file into one. transformers knows none of
these model types. One block of experts a layer, in three ways of writing them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.integrations import use_experts_implementation
from transformers.modeling_outputs import CausalLMOutput


class OwnConfig(PreTrainedConfig):
    model_type = "own_moe"

    def __init__(
        self, vocab_size: int = 96, hidden_size: int = 64, moe_intermediate_size: int = 48, num_experts: int = 4,
        num_experts_per_tok: int = 2, num_hidden_layers: int = 2, hidden_act: str = "silu", **kwargs: Any,
    ) -> None:  # fmt: skip
        self.vocab_size, self.hidden_size, self.hidden_act = vocab_size, hidden_size, hidden_act
        self.moe_intermediate_size, self.num_experts = moe_intermediate_size, num_experts
        self.num_experts_per_tok, self.num_hidden_layers = num_experts_per_tok, num_hidden_layers
        super().__init__(**kwargs)


class Expert(nn.Module):
    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class ListedExperts(nn.ModuleList):
    """One module for each expert."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(Expert(config) for _ in range(config.num_experts))

    def run(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        every = torch.stack([expert(x) for expert in self], dim=1)
        chosen = every.gather(1, ids.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return (chosen * weights.unsqueeze(-1)).sum(dim=1)


@use_experts_implementation
class StackedExperts(nn.Module):
    """All experts in one tensor, called in transformers' way."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden, inner))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("some experts_implementation runs these")


class HiddenExperts(nn.Module):
    """All experts in tensors whose names and order nobody else knows."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        inner, hidden = config.moe_intermediate_size, config.hidden_size
        self.matrices = nn.Parameter(torch.randn(3, config.num_experts, hidden, inner))


class Block(nn.Module):
    def __init__(self, config: OwnConfig, experts: type[nn.Module]) -> None:
        super().__init__()
        self.k = config.num_experts_per_tok
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = experts(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = hidden.reshape(-1, hidden.shape[-1])
        weights, ids = self.gate(x).softmax(dim=-1).topk(self.k, dim=-1)
        run = getattr(self.experts, "run", self.experts)
        return run(x, ids, weights).view_as(hidden)


class Layer(nn.Module):
    def __init__(self, config: OwnConfig, experts: type[nn.Module]) -> None:
        super().__init__()
        self.mlp = Block(config, experts)


class OwnModel(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    experts: type[nn.Module] = ListedExperts

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, self.experts) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = hidden + layer.mlp(hidden)
        return hidden


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig
    base_model_prefix = "model"
    body: type[OwnModel] = OwnModel

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.model = self.body(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids)))


class StackedModel(OwnModel):
    experts = StackedExperts


class StackedForCausalLM(OwnForCausalLM):
    body = StackedModel


class HiddenModel(OwnModel):
    experts = HiddenExperts


class HiddenForCausalLM(OwnForCausalLM):
    body = HiddenModel
