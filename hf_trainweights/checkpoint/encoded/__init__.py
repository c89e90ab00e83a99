"""One encoded file: a torch zip file whose tensors are stored by codecs."""
