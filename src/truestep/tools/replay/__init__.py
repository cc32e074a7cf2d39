"""Steps of a run, made again and compared.

replay            makes a step of a run again and says how it compares with the original
compare           finds the first difference between two runs, and its cause
bisect            finds the documents and labels that made a metric jump
jumps             finds the step at which a metric jumped
search            finds the few of many that make most of a sum
parts             each document's and each label's part of a metric, from one forward pass
gradient_parts    each document's and each label's part of the gradient's norm, by replays of parts of a step
outliers          the few parts that stand out among many
found             found documents as text and as files
files             what a run has written of each step: ledger, metrics, weights, options, records
differences       differences of metrics, norms and documents, and what they are judged by
"""
