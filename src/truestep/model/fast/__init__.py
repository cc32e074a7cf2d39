"""What is put in place of a Hugging Face model's own code. Every patch of transformers and torch:

| file | what is written | why, and what breaks it |
| --- | --- | --- |
| model/adapter.py | setattr, weight | layers with an adapter; plain nn.Linear, which a model's code calls |
| model/fast/gradient_accumulation.py | __class__ | products add gradients; plain nn.Linear |
| model/mixers/attention.py | AttentionInterface.register | attention over packed documents; a public door |
| model/fast/compiled.py | forward, gradient_checkpointing | compiled layers; switches recomputation on |
| model/fast/embedding.py | forward, padding_idx, _parameters, weight | float32 gradients; nn.Embedding's own |
| model/mixers/flash.py | register_autograd | operators of torch.compile; public doors |
| model/fast/rms_norm.py | __class__, own_form | norms add their weights' gradients; what a norm computes is compared |
| model/no_dropout.py | p, setattr | no dropout or jitter; floats of modules by their names |
| model/loading/probe_weights.py | register_forward_hook | layers with borrowed weights add a part; public hooks |
| model/loading/load.py | register_forward_hook | layers report that they are done; public hooks |
| model/loading/from_parts.py | register_parameter, generation_config | made without values; registers weights |
| ranks/group.py | _timeout | of gloo's groups in a mesh, which has no other door |
| gpu/operators.py | register_fake | operators of ours in compiled code; public |
| gpu/marks.py | register_hook | and so do their gradients |
| model/cuts/stages.py | register_forward_pre_hook, setattr | layers elsewhere pass on; a loop over the list of layers |
| model/cuts/tensor.py | forward, register_forward_pre_hook, setattr | slices; plain nn.Linear and the model's plan |
| model/cuts/tensor.py | weight, in_features, out_features, num_embeddings | the sizes of those slices |
| model/cuts/tensor.py | num_key_value_groups | query heads of a key head; transformers' own attention repeats by it |
| weights/sharded.py | register_parameter, _apply | a tied head reads the embedding; FSDP2's modules and `_apply` |
| weights/sharded.py | fsdp_pre_all_gather, fsdp_post_all_gather | another tensor is gathered; FSDP2's extensions |
| files/tensors.py | safe_save_file | written piece by piece; transformers.modeling_utils writes files by that name |
| gpu/pinned.py | atexit | of a finalizer; Python's own attribute |
| weights/lazy.py | safe_open, setattr | tensors unread; that transformers.modeling_utils opens files by that name |
| model/exact.py | AttentionInterface.register | attention of exact passes; a public door of transformers |
| model/exact.py | forward | layers run compiled in exact passes |
| generate/engine/attend.py | AttentionInterface.register | attention over a paged cache; a public door |
| generate/engine/forward.py | forward | layers, RoPE and norms run compiled while they sample |
| step/update/optimizer.py | register_step_post_hook | refuses what no checkpoint keeps; a public hook |
| weights/whole.py | register_post_accumulate_grad_hook | float32 gradients; a public hook |

`tests/model/test_patches.py` holds this list against the code.
"""
