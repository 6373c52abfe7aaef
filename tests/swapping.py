"""Code of others that moves the weights of blocks, as swappers and shards do it."""

import torch


class BlockSwapper:
    """Copies a block's weights in before it runs and destroys them after, as swappers do."""

    def __init__(self, blocks, backward: bool):
        self.stored = {block: [p.detach().clone() for p in block.parameters()] for block in blocks}
        self.handles = []
        for block in blocks:
            self.handles.append(block.register_forward_pre_hook(self.fetch))
            self.handles.append(block.register_forward_hook(self.drop))
            if backward:
                self.handles.append(block.register_full_backward_pre_hook(self.fetch))

    def fetch(self, block, *_):
        for parameter, value in zip(block.parameters(), self.stored[block], strict=True):
            parameter.data.copy_(value)

    def drop(self, block, *_):
        for parameter in block.parameters():
            parameter.data.fill_(float("nan"))

    def remove(self):
        for handle in self.handles:
            handle.remove()
        for block in self.stored:
            self.fetch(block)


class LoopSwapper:
    """Is called by a model's loop between its blocks; brings everything back before backward."""

    def __init__(self, blocks):
        self.blocks = list(blocks)
        self.stored = {block: [p.detach().clone() for p in block.parameters()] for block in blocks}
        for block in blocks:
            self.take_out(block)

    def bring_in(self, block):
        for parameter, value in zip(block.parameters(), self.stored[block], strict=True):
            parameter.data = value.clone()

    def take_out(self, block):
        for parameter in block.parameters():
            parameter.data = torch.full_like(parameter, float("nan"))

    def after(self, index):
        """What a loop calls after block ``index``, and with -1 before the first one."""
        if index >= 0:
            self.take_out(self.blocks[index])
        if index + 1 < len(self.blocks):
            self.bring_in(self.blocks[index + 1])

    def bring_all_in(self, *_):
        for block in self.blocks:
            self.bring_in(block)


class Releaser:
    """Gathers and releases the weights of every module with hooks of its own, as ZeRO-3 does.

    ``frees``: whether the memory is freed under the tensors, as FSDP does, or they become empty.
    ``frozen``: whether it is that of frozen weights only. ``whole``: whether a block has the hooks.
    """

    def __init__(self, blocks, frees: bool, frozen: bool = False, whole: bool = False):
        self.frees = frees
        self.frozen = frozen
        self.whole = whole
        self.handles = []
        inside = [m for block in blocks for m in block.modules()]
        modules = [m for m in (blocks if whole else inside) if self.own(m)]
        self.full = {m: {n: p.detach().clone() for n, p in self.own(m)} for m in modules}
        for module in modules:
            self.handles += [
                module.register_forward_pre_hook(self.gather),
                module.register_forward_hook(self.release),
                module.register_full_backward_pre_hook(self.gather),
                module.register_full_backward_hook(self.release),
            ]
            self.release(module)

    def own(self, module):
        found = module.named_parameters(recurse=self.whole)
        return [(name, p) for name, p in found if not (self.frozen and p.requires_grad)]

    def gather(self, module, *_):
        for name, parameter in self.own(module):
            full = self.full[module][name]
            if self.frees:
                parameter.untyped_storage().resize_(full.untyped_storage().nbytes())
                parameter.data.copy_(full)
            else:
                parameter.data = full.clone()

    def release(self, module, *_):
        for _, parameter in self.own(module):
            if self.frees:
                parameter.untyped_storage().resize_(0)
            else:
                parameter.data = parameter.new_empty(0)

    def remove(self):
        for handle in self.handles:
            handle.remove()
        for module in self.full:
            self.gather(module)
