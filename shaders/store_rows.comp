// store_rows: rows of K or V into the cache: cache[head, slot + r] = x[r, head].
//
// x       float [rows, heads, size]
// slot    uint [1]                               of the first row: host memory, changes from run to run
// cache   uint [heads, capacity, words]          store_rows_f32: words = size, the bits of float32;
//                                                store_rows_f16: words = size / 2, two float16 each
//
// push: rows, heads, size (f16: even), capacity; the _at of every binding. Groups: (any); they share the work.
// Reference: cache[:, slot : slot + rows] = x.transpose(1, 0, 2).
//
// variant: store_rows_f32
// variant: store_rows_f16 F16
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint x_at;
    uint slot_at;
    uint cache_at;
    uint rows;
    uint heads;
    uint size;
    uint capacity;
};

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) readonly buffer Slot { uint slot[]; };
layout(std430, binding = 2) writeonly buffer Cache { uint cache[]; };

void main() {
#ifdef F16
    const uint words = size / 2;
#else
    const uint words = size;
#endif
    const uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < rows * heads * words; i += step) {
        const uint word = i % words, head = i / words % heads, row = i / words / heads;
        const uint to = cache_at + (head * capacity + slot[slot_at] + row) * words + word;
#ifdef F16
        cache[to] = packHalf2x16(vec2(x[x_at + 2 * i], x[x_at + 2 * i + 1]));
#else
        cache[to] = floatBitsToUint(x[x_at + i]);
#endif
    }
}
