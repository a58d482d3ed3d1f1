// SPDX-License-Identifier: Apache-2.0
#include "reference.h"

#include <algorithm>
#include <random>

namespace smoke {
namespace {

Values integers(size_t count, int most, int factor, std::mt19937 &random) {
    Values values(count);
    for (double &value : values) value = (int(random() % (2 * most + 1)) - most) * factor;
    return values;
}

// f(x), or x without a prologue.
Values prologue(const Problem &p, const Tensors &t) {
    Values x = t.x;
    const size_t image = size_t(p.height) * p.width;
    for (size_t i = 0; p.prologue && i < x.size(); ++i) {
        const size_t c = i / image % p.c;
        x[i] = std::max(0.0, t.scale[c] * x[i] + t.shift[c]);
    }
    return x;
}

// Means over windows, whose pads count as zeros.
Values average_pool(const Problem &p, const Values &x) {
    const int rows = p.pooled(p.height), columns = p.pooled(p.width);
    Values means(size_t(p.n) * p.c * rows * columns);
    for (size_t at = 0; at < means.size(); ++at) {
        const int row = int(at / columns % rows), column = int(at % columns);
        const size_t image = at / (size_t(rows) * columns) * p.height * p.width;
        double sum = 0;
        for (int i = 0; i < p.window; ++i)
            for (int j = 0; j < p.window; ++j) {
                const int h = row * p.pool_stride() + i - p.pool_pad(), w = column * p.pool_stride() + j - p.pool_pad();
                if (h >= 0 && h < p.height && w >= 0 && w < p.width) sum += x[image + size_t(h) * p.width + w];
            }
        means[at] = sum / (p.window * p.window);
    }
    return means;
}

// One element of Conv: of image n, output channel m, at (row, column).
double convolve(const Problem &p, const Values &pooled, const Values &weights, int n, int m, int row, int column) {
    const int height = p.pooled(p.height), width = p.pooled(p.width);
    double sum = 0;
    for (int i = 0; i < p.kernel; ++i)
        for (int j = 0; j < p.kernel; ++j) {
            const int h = row * p.conv_stride() + i - p.conv_pad(), w = column * p.conv_stride() + j - p.conv_pad();
            if (h < 0 || h >= height || w < 0 || w >= width) continue;
            const double *const tap = &weights[size_t((m * p.kernel + i) * p.kernel + j) * p.c];
            for (int c = 0; c < p.c; ++c) sum += tap[c] * pooled[(size_t(n * p.c + c) * height + h) * width + w];
        }
    return sum;
}

}  // namespace

Tensors make_tensors(const Problem &p, bool filter_fused) {
    std::mt19937 random(1);
    const int size = p.window * p.window, x_factor = filter_fused ? 1 : size, w_factor = filter_fused ? size : 1;
    const size_t out = size_t(p.out(p.height)) * p.out(p.width);
    Tensors t;
    t.x = integers(size_t(p.n) * p.c * p.height * p.width, 2, x_factor, random);
    t.w = integers(size_t(p.m) * p.kernel * p.kernel * p.c, 2, w_factor, random);
    t.residual = integers(size_t(p.n) * p.m * out, 2, 1, random);
    t.bias = integers(p.m, 2, 1, random);
    t.scale = integers(p.c, 1, 1, random);
    t.shift = integers(p.c, 1, x_factor, random);
    return t;
}

Values reference(const Problem &p, const Tensors &t) {
    const Values pooled = average_pool(p, prologue(p, t));
    const int rows = p.out(p.height), columns = p.out(p.width);
    Values y(size_t(p.n) * p.m * rows * columns);
    size_t at = 0;
    for (int n = 0; n < p.n; ++n)
        for (int m = 0; m < p.m; ++m)
            for (int row = 0; row < rows; ++row)
                for (int column = 0; column < columns; ++column, ++at) {
                    y[at] = convolve(p, pooled, t.w, n, m, row, column);
                    if (p.epilogue) y[at] = std::max(0.0, y[at] + t.bias[m] + t.residual[at]);
                }
    return y;
}

Values channels_last(const Values &values, int n, int channels) {
    const size_t image = values.size() / n / channels;
    Values moved(values.size());
    for (size_t at = 0; at < values.size(); ++at) {
        const size_t pixel = at % image, c = at / image % channels, batch = at / image / channels;
        moved[(batch * image + pixel) * channels + c] = values[at];
    }
    return moved;
}

}  // namespace smoke
