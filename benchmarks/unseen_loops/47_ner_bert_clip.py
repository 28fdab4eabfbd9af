# ruff: noqa
# reduced from kamalkraj/BERT-NER run_ner.py (labels of equal length)
import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, labels=5):
        super().__init__()
        self.emb = nn.Embedding(60, 24)
        self.lstm = nn.LSTM(24, 16, bidirectional=True, batch_first=True)
        self.classifier = nn.Linear(32, labels)

    def forward(self, ids, labels):
        logits = self.classifier(self.lstm(self.emb(ids))[0])
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main(gradient_accumulation_steps=2, max_grad_norm=0.05, num_train_epochs=2):
    torch.manual_seed(18)
    batches = [(torch.randint(0, 60, (4, 10)), torch.randint(0, 5, (4, 10))) for _ in range(8)]
    model = Tagger()
    no_decay = ["bias"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(d in n for d in no_decay)],
            "weight_decay": 0.01,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(d in n for d in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=5e-3, eps=1e-8)
    total = len(batches) // gradient_accumulation_steps * num_train_epochs
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=total)
    global_step, tr_loss = 0, 0.0
    model.train()
    for epoch in range(num_train_epochs):
        for step, (input_ids, label_ids) in enumerate(batches):
            loss = model(input_ids, label_ids)
            if gradient_accumulation_steps > 1:
                loss = loss / gradient_accumulation_steps
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
            tr_loss += loss.item()
            if (step + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
                scheduler.step()
                model.zero_grad()
                global_step += 1
        print("global_step", global_step, "loss", tr_loss / global_step)


if __name__ == "__main__":
    main()
