"""`truestep demo`: a whole RL run on this machine, without a GPU or a download.

model             a tiny Qwen3 model and its tokenizer, made on the spot
run               warm-up on a corpus of mixed quality, then GRPO, then the page
"""
