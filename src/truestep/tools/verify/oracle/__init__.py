"""A step in float64, from its advantages to its update, as docs/contract.md, sections 3 to 9, define it.

It shares nothing with the code that trains and has no packing, no chunks and no ranks: it loops over documents and
over their labels. Every label has one loss term and one weight; the loss is the sum of weight * term. The gradient is
autograd's on that sum. Where the contract is silent, the oracle decides; each such place says "Decision".

Symbols: D documents of the step (those without labels too), N labels of the step, N_d labels of document d,
T tokens of a document, V vocabulary. rho is the ratio of one label, R_d gspo's ratio of a document.
"""
