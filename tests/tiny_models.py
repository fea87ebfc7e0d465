"""Tiny random models with a real tokenizer, as the folders that Hugging Face writes.

Trap: vLLM on CPU serves no attention head smaller than 32, and a vocabulary above the tokenizer's would let a random
model sample ids that decode to nothing; so head_dim is 32 and the vocabulary is the tokenizer's.
"""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma", "gemma2", "gemma3_text")
MAX_CONTEXT = 512

_SENTENCES = [
    "A baker sells 12 loaves in the morning and 30 loaves in the afternoon. How many loaves does the baker sell?",
    "Mia has 7 apples. She gives 3 apples to Tom and buys 15 more. How many apples does she have now?",
    "A train travels 60 miles an hour for 4 hours. How many miles does the train travel in all?",
    "The answer is 42. Let us think step by step: 12 + 30 = 42, so the total is 42 loaves.",
    "There are 5 boxes with 24 pencils each; 5 * 24 = 120 pencils. The final answer is: #### 120",
    "user asks a question and the assistant answers it. You are a helpful assistant of the system.",
    "How much money does he have left after he has paid 18 dollars for the book and 2 dollars for the pen?",
]


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE, about 500 entries: ids 0 and 2 end a text, 0 also begins one, 3 pads; ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.model_max_length = MAX_CONTEXT
    return fast


def make_tiny_model(
    folder: Path,
    *,
    architecture: str = "llama",
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write a random 2-layer model of hidden size 64 to `folder` and return it.

    `architecture` is one of ARCHITECTURES (Hugging Face's model types). The same arguments give the same weights, and
    the global random state is left as it was. `generation_config.json` names two end tokens, ids 0 and 2.
    """
    tokenizer = tiny_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": MAX_CONTEXT,
        # Wide enough that the distributions are far from uniform.
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if architecture not in ("qwen2", "phi3"):
        shape["head_dim"] = 32
    if architecture in ("gemma2", "gemma3_text"):
        shape |= {"sliding_window": 32, "query_pre_attn_scalar": 32}
    if architecture == "mistral":
        shape["sliding_window"] = None
    config = AutoConfig.for_model(architecture, **shape)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=[2, 0],
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(dtype).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def make_tiny_classifier(folder: Path, *, seed: int = 1) -> Path:
    """Write a random sequence classifier of one label, a reward model, to `folder` and return it."""
    make_tiny_model(folder, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.from_pretrained(folder, num_labels=1)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    return folder
