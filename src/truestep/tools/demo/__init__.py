"""`truestep demo`: a whole RL run on this machine, without a GPU or a download.

model             creates a tiny Qwen3 model and its tokenizer
run               supervised warm-up on a corpus of mixed quality, then GRPO, then the report
"""
