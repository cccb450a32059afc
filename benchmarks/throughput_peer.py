"""Hugging Face `generate` on the model folder that benchmarks/throughput.py wrote; runs in the peer's own environment.

    PEER/bin/python benchmarks/throughput_peer.py FOLDER DTYPE THREADS

Reads orders from stdin, one JSON object a line: {"prompts": [[ids], ...], "tokens": n, "batch": n}; answers each with
{"seconds": s, "outputs": [[ids], ...]}.
"""

import json
import sys
import time

import torch
import transformers


def main() -> None:
    folder, dtype, threads = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    print(json.dumps({"version": f"transformers {transformers.__version__}, torch {torch.__version__}"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts, tokens, batch = order["prompts"], order["tokens"], order["batch"]
        outputs: list[list[int]] = []
        started_s, started_cpu_s = time.perf_counter(), time.process_time()
        for first in range(0, len(prompts), batch):
            ids = torch.tensor(prompts[first : first + batch])
            with torch.inference_mode():
                found = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=tokens,
                    min_new_tokens=tokens,
                    pad_token_id=0,
                )
            outputs += found[:, ids.shape[1] :].tolist()
        seconds, cpu_seconds = time.perf_counter() - started_s, time.process_time() - started_cpu_s
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "outputs": outputs}), flush=True)


if __name__ == "__main__":
    main()
