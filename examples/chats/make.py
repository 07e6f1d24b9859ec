"""Conversations about sums of two numbers, and a small Llama with tokenizer and chat template.

CPU, a second:  python examples/chats/make.py

It writes `chat.jsonl` and `base/` into the current folder. docs/fine_tuning.md trains on them. Needs
`pip install -e '.[hf]'`.
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sums = [(a, b) for a in range(20) for b in range(20)]
chats = [
    [{"role": "user", "content": f"What is {a} plus {b}?"}, {"role": "assistant", "content": f"It is {a + b}."}]
    for a, b in sums
]
Path("chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))

words = Tokenizer(models.BPE())
words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
letters = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=letters, show_progress=False)
words.train_from_iterator([message["content"] for chat in chats for message in chat], trainer)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|im_end|>")
tokenizer.chat_template = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
tokenizer.save_pretrained("base")

torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=320, num_key_value_heads=2, max_position_embeddings=256, **shape)
LlamaForCausalLM(config).save_pretrained("base")
