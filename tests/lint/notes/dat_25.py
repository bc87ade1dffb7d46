import mxnet as mx

record = mx.recordio.MXIndexedRecordIO("tmp.idx", "tmp.rec", "r")  # here: FLB2106
print(record.read_idx(3))
