"""LoRA in TRL's SFTTrainer, with exact windows of 8 micro-batches: a tiny Llama, made on the spot.

python examples/integrations/trl_sft.py

It takes a minute on a CPU and downloads nothing. To fine-tune a checkpoint, pass its name as
`model=`, leave out `processing_class=`, and load your own rows.
"""

from datasets import Dataset
from peft import LoraConfig
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from wholebatch.integrations.transformers import exact

tokenizer = ByT5Tokenizer()  # a token is a byte
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=4, **sizes)
args = SFTConfig(
    output_dir="runs",
    per_device_train_batch_size=2,
    gradient_accumulation_steps=8,
    max_steps=10,
    logging_steps=5,
    learning_rate=1e-2,
    bf16=False,
    dataloader_pin_memory=False,
    report_to="none",
)
trainer = exact(SFTTrainer)(  # was SFTTrainer(
    model=LlamaForCausalLM(config),
    args=args,
    train_dataset=Dataset.from_list([{"text": f"twice {n} is {2 * n}"} for n in range(500)]),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
)
trainer.train()
