"""TRL's SFTTrainer over conversations, padded or packed: sft.py padded|packed."""

import sys

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

words = ["<pad>", "<unk>", "<end>", "user", "assistant", "what", "is", "it"]
words += [str(number) for number in range(64)]
words = {word: number for number, word in enumerate(words)}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>"
)
tokenizer.chat_template = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} <end> {% endfor %}"
)
conversations = [
    [
        {"role": "user", "content": "what is " + " ".join(map(str, range(number % 7 + 1)))},
        {"role": "assistant", "content": "it is " + " ".join(map(str, range(number % 11 + 1)))},
    ]
    for number in range(64)
]
torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
sizes |= {"num_key_value_heads": 1, "intermediate_size": 16, "vocab_size": len(words)}
trainer = SFTTrainer(
    model=Qwen2ForCausalLM(Qwen2Config(**sizes)),
    args=SFTConfig(
        output_dir="trained",
        num_train_epochs=2,
        per_device_train_batch_size=4,
        max_length=32,
        packing=sys.argv[1] == "packed",
        padding_free=False,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        dataloader_num_workers=2,
    ),
    train_dataset=datasets.Dataset.from_dict({"messages": conversations}),
    processing_class=tokenizer,
)
trainer.train()
for entry in trainer.state.log_history:
    if "loss" in entry:
        print("loss", entry["loss"], entry["grad_norm"])
