// SPDX-License-Identifier: Apache-2.0
// The bytes of a plugin in an engine of TensorRT 8.6 or 9: a magic number, the attributes, what its builder granted, and a
// checksum.
#pragma once

#include "launcher.h"

namespace convpool::tensorrt {

// The facts of the build that enqueue must know: TensorRT passes it a pointer to workspace, not its size.  It asked
// getWorkspaceSize at the largest shapes of a profile, after configurePlugin had named its smallest and largest ones;
// `bytes` is the least that this layer answers for the profiles it was configured for.
struct Grant {
    int32_t inputs = 0;  // 0: never configured, and the rest means nothing
    DeviceSize device{};
    int64_t bytes = 0;
    convpool_problem largest{};
};

// Bytes of serialize().
std::vector<char> to_bytes(const PluginCore &core, const Grant &grant);

// The same back.  Throws unless the bytes are whole, of this format, and describe what a builder can have stored.
std::pair<PluginCore, Grant> from_bytes(const Operator &op, const void *data, size_t length);

}  // namespace convpool::tensorrt
