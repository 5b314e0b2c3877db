"""ms-swift's `swift sft` on conversations in a JSON Lines file: swift_sft.py map|stream."""

import json
import sys
from pathlib import Path

import torch
from swift.pipelines import sft_main
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
tokens = {token: number for number, token in enumerate(special + letters)}
tokenizer = Tokenizer(models.BPE(tokens, []))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    eos_token="<|im_end|>",
    pad_token="<|endoftext|>",
    additional_special_tokens=special,
).save_pretrained("tiny")
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
sizes |= {"num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": len(tokens)}
Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained("tiny")
rows = [
    {
        "messages": [
            {"role": "user", "content": "what is " + "x" * (number % 7 + 1)},
            {"role": "assistant", "content": f"it is {number}"},
        ]
    }
    for number in range(64)
]
Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def show(callback, args, state, control, logs=None, **_):
    if "loss" in logs:
        print("\nloss", logs["loss"], logs["grad_norm"], flush=True)


TrainerCallback.on_log = show
sft_main(
    [
        "--model=tiny",
        "--model_type=qwen2",
        "--template=chatml",
        "--dataset=rows.jsonl",
        "--tuner_type=full",
        "--torch_dtype=float32",
        f"--streaming={'true' if sys.argv[1] == 'stream' else 'false'}",
        "--max_steps=12",
        "--per_device_train_batch_size=4",
        "--dataloader_num_workers=2",
        "--learning_rate=1e-3",
        "--lazy_tokenize=true" if sys.argv[1] == "map" else "--lazy_tokenize=false",
        "--max_length=128",
        "--logging_steps=1",
        "--save_strategy=no",
        "--eval_strategy=no",
        "--split_dataset_ratio=0",
        "--report_to=none",
        "--use_cpu=true",
        "--output_dir=trained",
    ]
)
