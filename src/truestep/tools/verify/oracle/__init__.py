"""A step in float64, from its advantages to its update, as docs/contract.md, sections 3 to 9, define it.

The oracle shares no code with training, and has no packing, chunks or ranks: it loops over documents and their labels.
Every label has one loss term and one weight; the loss is the sum of weight * term, and autograd computes its gradient.
Where the contract is silent, the oracle decides; such comments begin with "Decision".

records           records to documents
advantages        advantages from rewards
values            log-probs and entropies of a model
losses            loss terms and their weights
metrics           the metrics of a step
episodes          the metrics of turns and tool calls
step              loss, gradients and metrics of a step
schedule          learning rate and gradient clipping
updates           the optimizers' updates, with float32 rounding

Symbols: D documents of the step (with and without labels), N labels of the step, N_d labels of document d, T tokens of
a document, V vocabulary. rho is the ratio of one label, R_d gspo's ratio of a document.
"""
