"""A program that embeds refold; `make typecheck` checks it under `mypy --strict`, as its author would."""

import asyncio

from refold import Engine, Rejected, SamplingParams


async def main() -> str:
    """Generate, as the README shows."""
    text = ""
    async with Engine(model="smollm2", journal="sqlite:///refold.db") as engine:
        params = SamplingParams(max_tokens=8, temperature=0)
        try:
            async for delta in engine.generate("Why is the sky blue?", params, request_id="sky"):
                text += delta.text
        except Rejected as refusal:
            text = str(refusal)
    return text


if __name__ == "__main__":
    asyncio.run(main())
