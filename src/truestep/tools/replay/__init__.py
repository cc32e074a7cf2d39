"""Steps of a run, made again and compared.

replay            makes a step of a run again and says how it compares with the original
compare           finds the first difference between two runs, and its cause
files             what a run has written of each step: ledger, metrics, weights, options, records
differences       differences of metrics, norms and documents, and what they are judged by
"""
