import mxnet as mx

header = mx.recordio.IRHeader(0, 4, 2574, 0)  # here: FLB2106
packed = mx.recordio.pack(header, b"data")  # here: FLB2106
