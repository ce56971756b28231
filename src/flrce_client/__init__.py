"""The device's side of flrce without PyTorch: codes, difference downloads, names and costs, in
numpy.

flrce builds on the definitions here; a device needs this package, numpy and Flower.
"""
