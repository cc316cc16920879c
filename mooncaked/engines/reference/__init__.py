"""A small engine for models of the Llama architecture: the readable example of a client of the store.

    python -m mooncaked.engines.reference --model DIR_OR_GGUF --listen 127.0.0.1:8000

A request passes, in order: `server` (OpenAI's HTTP), `requests` (what is asked, checked), `chat` and
`tokenizer` (text to tokens), `scheduler` (what runs in the next step), `engine` (the thread that steps),
`kv_store` (KV blocks from and to the node's daemon), `model` over `kv_cache` (the arithmetic), `sampling`,
then `text` and `responses` back out. `weights*`, `model_files` and `tokenizer_gguf` load a model.

Exactness
=========
At temperature 0, and at any temperature with a seed, the answer to a prompt is the same, token for token,
whether its KV was computed here, loaded from a store, or computed by a prefill instance and continued here;
and whatever else the engine serves at the same time. That is so because every number is computed in one way:

- A prompt is computed in chunks of `chunk_tokens` rows, aligned to absolute positions: the token at position
  p is row p % chunk_tokens of chunk p // chunk_tokens. A last, shorter chunk is padded to full size. So each
  product has the same shape for chunk number c of every prompt, and attention runs over exactly
  (c + 1) * chunk_tokens keys, those to come masked out. A row depends on the tokens up to its own, never on
  the padding: a masked key has weight 0 exactly, and kernels of one shape treat rows alike.
- When KV is loaded, whole chunks are: computing goes on at the last chunk border that the loaded blocks
  reach. The chunk of the prompt's last token is always computed, since its logits are needed and are not
  stored. (Except where prefill has sent the first token along: then all KV may come from the store.)
- KV is stored in the type that it is computed in, so loading changes no bit. Only KV that was computed by
  such chunks is stored; that of generated tokens is not, for it was computed in another shape.
- Tokens are generated in steps of `DECODE_ROWS` rows, unused rows padded, so the products have one shape
  however many requests run. Attention is computed for each request by itself, over its own length.
- The logits of a prompt's last token are computed from a single row, in every mode.
- A random draw is a hash of the request's seed and the index of the token, not the state of a generator.

What it relies on: that a kernel gives a row the same bits for the same shape, wherever in the batch the row
is (`tests/engines/test_exactness.py` checks it), and that nodes which share blocks have processors with the
same vector instructions (else set MKL_CBWR=AVX2,STRICT on all of them). The block namespace covers what
must agree: weights, numeric type, block and chunk size.
"""

from mooncaked.engines.reference.libraries import prepare

prepare()
