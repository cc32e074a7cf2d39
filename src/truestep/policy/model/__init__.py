"""What is put in place of a Hugging Face model's own code. Every patch of transformers and torch:

| file | what is written | why, and what breaks it |
| --- | --- | --- |
| model/adapter.py | setattr, weight | layers with an adapter; plain nn.Linear, which a model's code calls |
| model/adding.py | __class__ | products add gradients; plain nn.Linear |
| model/attention.py | AttentionInterface.register | attention over packed documents; a public door of transformers |
| model/compiled.py | forward, gradient_checkpointing | compiled layers; the attribute that switches recomputation on |
| model/embedding.py | forward, padding_idx, _parameters, weight | a token's gradient in float32; nn.Embedding's own |
| model/flash.py | register_autograd | operators of torch.compile; public doors |
| model/norms.py | __class__, own_form | norms add their weights' gradients; what a norm computes is compared |
| model/training.py | p, setattr | no dropout or jitter; floats of modules by their names |
| loading/borrowed.py | register_forward_hook | layers with borrowed weights add a part; public hooks |
| loading/load.py | register_forward_hook | layers report that they are done; public hooks |
| loading/parts.py | register_parameter, generation_config | made without values; modules register weights by it |
| ranks/group.py | _timeout | of gloo's groups in a mesh, which has no other door |
| ranks/marks.py | register_hook | and so do their gradients |
| cuts/stages.py | register_forward_pre_hook, setattr | layers elsewhere pass on; a loop over the list of layers |
| cuts/tensor.py | forward, register_forward_pre_hook, setattr | slices; plain nn.Linear and the model's plan |
| cuts/tensor.py | weight, in_features, out_features, num_embeddings | the sizes of those slices |
| cuts/tensor.py | num_key_value_groups | query heads of a key head; transformers' own attention repeats by it |
| weights/sharded.py | register_parameter, _apply | a tied head reads the embedding; FSDP2's modules and `_apply` |
| weights/sharded.py | fsdp_pre_all_gather, fsdp_post_all_gather | another tensor is gathered; FSDP2's extensions |
| tensor_files.py | safe_save_file | written piece by piece; transformers.modeling_utils writes files by that name |
| weights/host.py | atexit | of a finalizer; Python's own attribute |
| weights/unread.py | safe_open, setattr | tensors unread; that transformers.modeling_utils opens files by that name |
| exact.py | AttentionInterface.register | attention of exact passes; a public door of transformers |
| exact.py | forward | layers run compiled in exact passes |
| sampler/engine/attend.py | AttentionInterface.register | attention over a paged cache; a public door of transformers |
| sampler/engine/forward.py | forward | layers, rotary embeddings and norms beside them run compiled while they sample |
| step/optimizer.py | register_step_post_hook | refuses what no checkpoint keeps; a public hook |
| weights/whole.py | register_post_accumulate_grad_hook | float32 gradients; a public hook |

`tests/policy/test_patches.py` holds this list against the code.
"""
