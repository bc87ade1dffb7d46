import numpy as np
from scipy import linalg

a = np.random.rand(4, 4)
q, r = np.linalg.qr(a)
u, s, vh = linalg.svd(a)
lu, piv = linalg.lu_factor(a)
x = np.linalg.solve(a, np.ones(4))
print(np.linalg.eig(a)[0], q.shape, u.shape, lu.shape, piv, x)
