"""What is computed: one GPT that covers the GPT-2 and the Llama families.

gpt        embedding, blocks, head            norm       RMSNorm and LayerNorm
block      the residual pattern               rope       rotary angles at global positions
attention  qkv, rope, projection              presets    named sizes
mlp        gated or plain feed-forward        generate   text from a model
context    of a batch: positions, what attends
kv_cache   keys, values of tokens seen before
recompute  what a block keeps for its backward
hf         Hugging Face's weights as ours, and back
hf_config  their config.json                   hf_names  which tensor is which rows of which
"""
