import mxnet as mx


def write(image, label):
    header = mx.recordio.IRHeader(0, label, 0, 0)  # here: FLB2106
    return mx.recordio.pack_img(header, image, quality=95, img_fmt=".jpg")  # here: FLB2106
