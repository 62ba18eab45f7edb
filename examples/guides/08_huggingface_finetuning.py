"""Fine-tune a small transformer on several nodes with the Trainer; nothing is downloaded."""

import argparse
import os
import random

import skyward as sky

GOOD = ["lovely", "brilliant", "warm", "delightful", "fine", "gripping"]
BAD = ["dull", "awful", "cold", "tedious", "poor", "clumsy"]
PLAIN = ["the", "film", "was", "a", "story", "and", "its", "music", "felt", "very", "scenes", "some"]


def reviews(count: int, seed: int) -> list[dict]:
    """Sentences whose mood is decided by two words, each with its label."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        label = chance.randrange(2)
        words = chance.choices(PLAIN, k=8) + chance.choices(GOOD if label else BAD, k=2)
        chance.shuffle(words)
        rows.append({"text": " ".join(words), "label": label})
    return rows


@sky.compute
@sky.stdout(only="head")
def fine_tune(train_rows: list[dict], test_rows: list[dict], epochs: int) -> dict:
    """Train on this node's part of the rows, together with the other nodes; what the evaluation says."""
    import tempfile

    import numpy as np
    import torch
    from datasets import Dataset
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

    vocabulary = {word: number for number, word in enumerate(["[PAD]", *PLAIN, *GOOD, *BAD])}

    def encode(row: dict) -> dict:
        ids = [vocabulary[word] for word in row["text"].split()]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": row["label"]}

    set_seed(0)  # the same first weights on every node
    shape = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(vocabulary), num_labels=2, **shape))

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            learning_rate=3e-3,
            average_tokens_across_devices=False,  # losses of sentences, not of tokens
            ddp_find_unused_parameters=False,
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
            eval_strategy="epoch",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Dataset.from_list([encode(row) for row in train_rows]),
            eval_dataset=Dataset.from_list([encode(row) for row in test_rows]),
            compute_metrics=lambda seen: {"accuracy": float((np.argmax(seen[0], -1) == seen[1]).mean())},
        )
        trainer.train()
        found = trainer.evaluate()
    return {"rank": arguments.process_index, "nodes": arguments.world_size, **found}


def main() -> None:
    """Open the nodes, train, and say what each of them found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--provider", choices=["local"], default="local")
    parser.add_argument("--nodes", type=int, default=2)
    args = parser.parse_args()

    plugins = [sky.plugins.torch(), sky.plugins.huggingface(token=os.environ.get("HF_TOKEN", "not-needed-here"))]
    provider = {"local": sky.Local}[args.provider]()
    with sky.ComputePool(provider=provider, nodes=args.nodes, plugins=plugins) as pool:
        results = fine_tune(reviews(2000, seed=1), reviews(200, seed=2), epochs=2) @ pool

    for result in results:
        print(f"rank {result['rank']} of {result['nodes']}: accuracy {result['eval_accuracy']:.1%}")
    if len({result["eval_accuracy"] for result in results}) > 1 or results[0]["eval_accuracy"] < 0.9:
        raise SystemExit("something is wrong: the nodes disagree, or they did not learn")


if __name__ == "__main__":
    main()
