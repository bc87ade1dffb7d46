"""Graphs of a model as pictures: modules and the data between them, and what autograd keeps."""
