"""Pictures of the pipeline's structures, each as SVG and as aligned text that says the same.

The room reads the other rooms' objects and changes none. `grid.py` draws, `structures.py` knows what each structure
looks like, `stepper.py` turns a list of snapshots into a slider; only that one needs ipywidgets, and only when shown.
vLLM has no such room.
"""
