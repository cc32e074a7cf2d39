"""Faster replacements for a Hugging Face model's own code.

activation_checkpointing  recomputes layers, fully or selectively; activation_offload: keeps layer inputs on the host
compiled                  layers compiled by torch.compile; compiler_backends: its backends
by_class                  puts a module of ours in a model by class
fused_layers              puts the fused modules in: fused_attention and fused_mlp
fused_products            QKV, or an MLP's first products, as one product while sampling
fused_attention_gradient  QKV, norm of heads and RoPE in training, with a fused backward pass
gradient_accumulation     products that add their gradients to float32 buffers
embedding                 float32 gradients of the input embedding; gather_rows: a gather with a float32 gradient
rms_norm                  RMS norms with a fused backward pass; rms_norm_kernel: its Triton kernels
rope                      norm of heads and RoPE in one kernel while sampling; rope_kernel: the kernel

Every patch of transformers and torch:

| file | attribute or hook | purpose; what the patch relies on |
| --- | --- | --- |
| model/adapter.py | setattr, weight | linear layers with an adapter; models call plain nn.Linear layers |
| model/fast/gradient_accumulation.py | __class__, number | float32 gradients of linear layers; plain nn.Linear |
| model/fast/by_class.py | __class__, setattr | attention, MLPs, norms; forms are compared with ours bit for bit |
| model/experts/grouped.py | __class__ | experts; values are compared with ours before weights are read |
| model/experts/grouped.py | first_number, last_number | attributes of our own modules |
| model/experts/grouped.py | _experts_implementation | transformers' loop over experts within a comparison |
| generate/engine/routes.py | routes | a field of an object of ours |
| model/experts/routers.py | number, terms, asks | attributes of our own modules |
| model/fast/fused_attention.py | __class__, constants | restores the class of a module that computes something else |
| model/fast/fused_attention.py | AttentionInterface.register | records what an attention passes on; public API |
| model/fast/fused_layers.py | joins, numbers | attributes of our own modules |
| model/mixers/attention.py | AttentionInterface.register | attention over packed documents; public API |
| model/fast/compiled.py | forward, gradient_checkpointing | compiled layers; transformers' recomputation switch |
| model/fast/embedding.py | forward, padding_idx, _parameters, weight | float32 gradients; attributes of nn.Embedding |
| model/handed.py | named | a field of an object of ours |
| model/handed.py | register_forward_hook, register_forward_pre_hook | keeps keyword arguments for layers; public API |
| model/mixers/recurrence.py | setattr, __kwdefaults__ | a method's code with other globals, which have our operations |
| model/mixers/recurrence.py | register_forward_hook, register_forward_pre_hook | which module runs; public API |
| model/mixers/recurrence.py | module | a field of an object of ours |
| model/mixers/flash.py | register_autograd, constants | custom operators for torch.compile; public API |
| model/mixers/paths.py | register_autograd | custom operators for torch.compile; public API |
| model/no_dropout.py | p, setattr | no dropout; float attributes with these names |
| model/loading/probe_weights.py | register_forward_hook | scales updates of layers with shared weights; public API |
| model/loading/same_experts.py | register_forward_hook | probes give tokens the same experts; public API |
| model/loading/load.py | register_forward_hook | layers report that they are done; public API |
| model/loading/from_parts.py | generation_config | set from the directory; transformers saves it |
| model/towers.py | config, generation_config, setattr | makes a text model of the parts of a multimodal one |
| ranks/group.py | _timeout | timeout of gloo groups in a mesh; no public API |
| gpu/operators.py | register_fake | our operators in compiled code; public API |
| gpu/marks.py | register_hook | layers' gradients report that they are done; public API |
| model/cuts/stages.py | register_forward_pre_hook, setattr | pass-through modules; models loop over a list of layers |
| model/cuts/experts.py | ranks, setattr | experts of this rank, in our own modules |
| model/cuts/tensor.py | register_forward_hook | sums of recurrent layers; public API |
| model/cuts/tensor.py | forward, register_forward_pre_hook, setattr | weight slices; plain nn.Linear, a plan |
| model/cuts/tensor.py | weight, in_features, out_features, num_embeddings | sizes of weight slices |
| model/cuts/tensor.py | num_key_value_groups | query heads per key head; transformers' own attention reads it |
| weights/sharded.py | register_parameter, _apply | a tied head uses the embedding; FSDP2's modules and `_apply` |
| weights/sharded.py | fsdp_pre_all_gather, fsdp_post_all_gather | gathers another tensor; FSDP2's extensions |
| files/tensors.py | safe_save_file | writes in pieces; transformers.modeling_utils has this name |
| gpu/pinned.py | atexit | a finalizer's attribute; Python's public API |
| weights/lazy.py | safe_open, setattr | unread tensors; transformers.modeling_utils has this name |
| weights/lazy.py | register_parameter | meta weights; nn.Module registers weights |
| model/fast/activation_checkpointing.py | training | a layer recomputes in training mode only |
| model/mixers/attention.py | training | evaluation mode within a block |
| model/exact.py | AttentionInterface.register | attention of exact passes; public API |
| model/exact.py | forward | compiled layers in exact passes |
| generate/engine/attend.py | AttentionInterface.register | paged attention; public API |
| generate/engine/forward.py | forward | compiled layers, RoPE and norms while sampling |
| step/update/optimizer.py | register_step_post_hook | refuses state that checkpoints lack; public API |
| weights/whole.py | register_post_accumulate_grad_hook | float32 gradients; public API |

`tests/model/test_patches.py` compares this list with the code.
"""
