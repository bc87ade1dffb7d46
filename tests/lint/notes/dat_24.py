import mxnet as mx

record = mx.recordio.MXRecordIO("tmp.rec", "w")  # here: FLB2106
for i in range(5):
    record.write("record_%d" % i)
record.close()
