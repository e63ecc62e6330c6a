"""From logits to tokens to text: parameters, the sampler, incremental detokenization."""
