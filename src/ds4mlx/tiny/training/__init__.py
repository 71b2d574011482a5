"""Training the tiny model, in PyTorch, which only this package imports: `pip install ds4mlx[train]`.

`model` is the graph, written for training; `train` the loop; `export` writes a checkpoint that `ds4mlx quantize` reads.
"""
