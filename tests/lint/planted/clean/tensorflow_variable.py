import tensorflow as tf
from tensorflow import Variable

w = Variable(tf.random.normal((3, 3)), trainable=True)
b = tf.Variable(tf.zeros((3,)))


def model(x):
    return tf.nn.softmax(tf.matmul(x, w) + b)
