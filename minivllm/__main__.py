"""`python -m minivllm "prompt"`: a model answers in the shell, token by token."""

from __future__ import annotations

import argparse
import sys
import time

from minivllm.llm import LLM
from minivllm.sampling.params import SamplingParams


def main(argv: list[str] | None = None) -> int:
    """Answer one prompt; returns the exit status (2: the input cannot be run, the reason is on stderr)."""
    parser = argparse.ArgumentParser(
        prog="python -m minivllm", description="Generate text with a model on this machine."
    )
    parser.add_argument("prompt", help="what to say to the model")
    parser.add_argument("--model", default="smollm2-135m", help="a Hugging Face folder, a .gguf file or an alias")
    parser.add_argument("--raw", action="store_true", help="continue the text itself, without the chat template")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token each time")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-model-len", type=int, default=None)
    args = parser.parse_args(argv)
    try:
        params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
        started = time.perf_counter()
        llm = LLM(args.model, dtype=args.dtype, device=args.device, max_model_len=args.max_model_len, max_num_seqs=1)
        loaded = time.perf_counter()
        tokenizer, prompt = llm.get_tokenizer(), args.prompt
        if tokenizer is not None and tokenizer.chat_template and not args.raw:
            messages = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, add_generation_prompt=True
            )
        shown, tokens = 0, 0
        for output in llm.stream(prompt, params):
            completion = output.outputs[0]
            print(completion.text[shown:], end="", flush=True)
            shown, tokens = len(completion.text), len(completion.token_ids)
            if output.error:
                raise ValueError(output.error)
    except (FileNotFoundError, TypeError, ValueError) as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return 2
    took = time.perf_counter() - loaded
    print(f"\n[loaded in {loaded - started:.1f} s; {tokens} tokens, {tokens / took:.1f} tok/s]", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
