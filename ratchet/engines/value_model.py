"""A value head on a Hugging Face backbone: one number for a place in a sequence.

Trap: a folder may be a policy's, a classifier's or a critic's export, and each has weights that the others lack. The
backbone is held to the same checks as any model; the head is found by its name, or is 0 where there is none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ratchet.data.packing import Entries, pack_by_tokens
from ratchet.engines.model import is_classifier, load_config, load_pretrained, weight_files
from ratchet.engines.packed import PackedModel, PackedTokens, pack
from ratchet.errors import EngineError

HEADS = ("score", "classifier", "v_head.summary", "value_head")
"""Names of a head of one number: of transformers' classifiers, of TRL, of others. Ours are exported as "score"."""
OUTPUT_LAYER = "lm_head."
"""What the names of an output layer's weights begin with."""


class ValueModel(PackedModel):
    """A backbone with a linear head of one output, which computes in float32 whatever the backbone does."""

    def __init__(self, backbone: PreTrainedModel, head: nn.Linear) -> None:
        super().__init__(backbone)
        self.score = head

    @classmethod
    def from_folder(
        cls, folder: Path, dtype: torch.dtype, *, device: torch.device, needs_head: bool = False
    ) -> "ValueModel":
        """Load any decoder's folder: a causal language model's, a classifier's of one label, an export of this class.

        An output layer is left out. Without a head (see HEADS) it is 0: the first values are then 0, which is what is
        known before training, and they need no seed. Raises EngineError where weights are missing or have other shapes,
        or where `needs_head` and there is none.
        """
        unused = (OUTPUT_LAYER, *(f"{name}." for name in HEADS))
        backbone = load_pretrained(AutoModel, folder, dtype, device=device, unused=unused)
        head = read_head(folder, backbone.config.get_text_config().hidden_size)
        if head is None and needs_head:
            raise EngineError(no_head(folder))
        if head is None:
            head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
            nn.init.zeros_(head.weight)
        return cls(backbone, head.to(device))

    def forward(self, packed: PackedTokens) -> Tensor:
        """Values [N], float32, at the predictors: of what is known before each scored token."""
        values: Tensor = self.score(self.hidden(packed).float())
        # A sum over the one label and not its slice: FSDP hooks into what is returned, and a view could lose the hook.
        return values.sum(-1)

    def named_weights(self, *, with_tied: bool = False) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters under the names that classifiers have: "model.layers...", "score.weight"."""
        prefix = self.model.base_model_prefix
        for name, parameter in super().named_weights(with_tied=with_tied):
            yield f"{prefix}.{name}", parameter
        for name, parameter in self.score.named_parameters():
            yield f"score.{name}", parameter

    def float32_modules(self) -> list[nn.Module]:
        """The head: in bfloat16 a value near 1 would be known to 1 in 256."""
        return [self.score]


def last_places(packed: PackedTokens) -> PackedTokens:
    """The same sequences with the last token of each as the predictor: of what is said of a whole text."""
    lengths = torch.tensor(packed.sequence_lengths, device=packed.input_ids.device)
    return replace(packed, predictors=lengths.cumsum(0) - 1)


@torch.no_grad()
def last_values(
    module: ValueModel, sequences: Sequence[Entries], *, max_tokens: int, device: torch.device
) -> list[float]:
    """The value at the last token of each sequence, in their order; they are packed by length."""
    found = [0.0] * len(sequences)
    for places in pack_by_tokens([len(ids) for ids in sequences], max_tokens):
        packed = pack([sequences[place] for place in places], [[]] * len(places), None, device)
        for place, value in zip(places, module(last_places(packed)).tolist(), strict=True):
            found[place] = value
    return found


def judged(ids: Sequence[int] | np.ndarray, padding: int | None) -> list[int]:
    """The tokens up to the one that a text is judged at: the last, or the last that is not `padding`, if there is one.

    Attention is causal, so that the tokens behind it say nothing.
    """
    length = len(ids)
    while length > 1 and ids[length - 1] == padding:
        length -= 1
    return [int(token_id) for token_id in ids[:length]]


def padding_id(config: PreTrainedConfig) -> int | None:
    """The token that a model of this configuration is not judged at: a classifier's padding; None for others."""
    if not is_classifier(config):
        return None
    found: int | None = config.get_text_config().pad_token_id
    return found


def no_head(folder: Path) -> str:
    """Return what to say of a folder without a head."""
    expected = ", ".join(f"{name}.weight" for name in HEADS)
    return f"model folder {str(folder)!r} holds no value or reward head; expected one of {expected}"


def check_same_tokens(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Raise EngineError where the model in `folder` does not read the ids that `tokenizer` writes as the same tokens.

    A folder without a tokenizer of its own must have a place for every id.
    """
    size = load_config(folder).get_text_config().vocab_size
    if size < len(tokenizer):
        raise EngineError(f"model folder {str(folder)!r} has {size} tokens, the policy's tokenizer {len(tokenizer)}")
    own = folder / "tokenizer.json"
    if own.is_file() and Tokenizer.from_file(str(own)).get_vocab() != tokenizer.get_vocab():
        raise EngineError(f"model folder {str(folder)!r} has another vocabulary than the policy: it must be the same")


def read_head(folder: Path, hidden_size: int) -> nn.Linear | None:
    """The head that the folder's weights hold, in float32, or None; EngineError for more than one output or head."""
    found: dict[str, Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            names = {f"{head}.{part}" for head in HEADS for part in ("weight", "bias")}
            found |= {name: file.get_tensor(name).float() for name in names.intersection(file.keys())}
    heads = [head for head in HEADS if f"{head}.weight" in found]
    if not heads:
        return None
    if len(heads) > 1:
        raise EngineError(f"model folder {str(folder)!r} holds several heads: {', '.join(heads)}; expected one")
    weight, bias = found[f"{heads[0]}.weight"], found.get(f"{heads[0]}.bias")
    if tuple(weight.shape) != (1, hidden_size) or (bias is not None and tuple(bias.shape) != (1,)):
        got = f"{tuple(weight.shape)} and a bias of {None if bias is None else tuple(bias.shape)}"
        raise EngineError(f"expected {heads[0]}.weight of one label, (1, {hidden_size}), in {str(folder)!r}, got {got}")
    head = nn.Linear(hidden_size, 1, bias=bias is not None)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    return head
