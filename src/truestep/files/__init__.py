"""Files, and bytes that others wrote.

whole             files that are complete or absent: written under another name, synced, renamed; files of lines
tensors           safetensors files, written and read piece by piece
disks             what a disk refuses, as one sentence
bounded           ceilings on lines, JSON and small files that others wrote
"""
