"""transformers' side of `real_model`: the same weights in float32, the same ids, one thread.

It needs `torch` and `transformers`, which are no dependencies of ours: only `real_model` imports
this file. The model is what `AutoModelForCausalLM` makes of the folder, with the attention that
it takes by itself (sdpa) and its own cache. What an application would have to do to be fast is
done for it: logits of the last token alone in prefill and of trained tokens alone in the update,
nothing kept for gradients where none is asked for, and the base's weights frozen. Adapters are
two factors beside each matrix, as peft has them, without its checks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
import transformers

# Ours to theirs, in one decoder layer.
MODULES = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
    "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip


def load(folder: Path) -> torch.nn.Module:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def logits(model: torch.nn.Module, ids_BT: np.ndarray) -> np.ndarray:
    """Returns logits [B, T, V]."""
    return model(torch.tensor(ids_BT)).logits.numpy()


@torch.inference_mode()
def first_token(model: torch.nn.Module, ids_BT: np.ndarray) -> None:
    """Reads prompts and draws a token after each, at temperature 1."""
    _draw(model(torch.tensor(ids_BT), use_cache=True, logits_to_keep=1).logits)


def _draw(logits_B1V: torch.Tensor) -> torch.Tensor:
    return torch.multinomial(torch.softmax(logits_B1V[:, -1], -1), 1)


@torch.inference_mode()
def decoder(model: torch.nn.Module, ids_BT: np.ndarray) -> Callable[[int], None]:
    """Reads prompts but for their last tokens; gives what decodes so many tokens after each."""
    ids = torch.tensor(ids_BT)
    read = model(ids[:, :-1], use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def decode(count: int) -> None:
        cache, drawn = copy.deepcopy(read), ids[:, -1:]
        for _ in range(count):
            drawn = _draw(model(drawn, past_key_values=cache, use_cache=True).logits)

    return decode


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank product beside it."""

    def __init__(self, base: torch.nn.Module, a: np.ndarray, b: np.ndarray, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = (torch.nn.Parameter(torch.tensor(x)) for x in (a, b))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a @ self.b) * self.scale


def adapt(
    model: torch.nn.Module, factors: Mapping[str, tuple[np.ndarray, np.ndarray]], scale: float
) -> torch.nn.Module:
    """Returns a model on the same weights with adapters: factors [L, in, r] and [L, r, out]."""
    with torch.no_grad():
        shared = {id(weight): weight for weight in model.parameters()}
        model = copy.deepcopy(model, shared)
    for number, layer in enumerate(model.model.layers):
        for name, (a, b) in factors.items():
            inside, last = MODULES[name].split(".")
            within = getattr(layer, inside)
            setattr(within, last, Adapted(getattr(within, last), a[number], b[number], scale))
    return model


def gradients(
    model: torch.nn.Module, ids_BT: np.ndarray, trained_BT: np.ndarray, advantages_BT: np.ndarray
) -> dict[str, np.ndarray]:
    """Gradients of the mean of -advantage * logprob over trained tokens, of the second factors.

    Row by row, [L, r, out] each; all factors' are computed.
    """
    model.zero_grad(set_to_none=True)
    count = int(trained_BT.sum())
    for ids_T, trained_T, advantages_T in zip(ids_BT, trained_BT, advantages_BT, strict=True):
        at = np.flatnonzero(trained_T)
        ids = torch.tensor(ids_T[None])
        hidden = model.model(ids, use_cache=False).last_hidden_state[0, at - 1]
        logprobs = torch.log_softmax(model.lm_head(hidden), -1)
        chosen = logprobs.gather(-1, torch.tensor(ids_T[at])[:, None])[:, 0]
        (-(chosen * torch.tensor(advantages_T[at])).sum() / count).backward()
    found: dict[str, list[np.ndarray]] = {name: [] for name in MODULES}
    for layer in model.model.layers:
        for name, path in MODULES.items():
            found[name].append(layer.get_submodule(path).b.grad.numpy())
    return {name: np.stack(each) for name, each in found.items()}
