// quantize_rows: rows to Q80 activations, as the integer products take them: blocks of 32, scale = max|x| / 127,
// codes rounded half away from zero, biased by 128 so that they are unsigned bytes.
//
// x       float [rows, columns]
// result  uint [rows, columns/32, 12]: 8 words of codes, bytes in the order 2, 3, 0, 1 of each four (so that a word's
//         halves pair with those of the weights, linear_int.comp); the bits of the scale; the sum of the biased codes;
//         2 unused
//
// push: blocks = rows * columns / 32; the _at of every binding.
// Groups: (ceil(blocks / WORKGROUP_X)); one invocation a block.
// Reference: reference.quantize_dequantize_rows.
#version 450

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint x_at;
    uint result_at;
    uint blocks;
};

layout(std430, binding = 0) readonly buffer X { float x[]; };
layout(std430, binding = 1) writeonly buffer Result { uint result[]; };

const uint RECORD = 12;

void main() {
    const uint block = gl_GlobalInvocationID.x;
    if (block >= blocks) {
        return;
    }
    const uint from = x_at + block * 32;
    const uint to = result_at + block * RECORD;
    float largest = 0.0;
    for (uint i = 0; i < 32; i++) {
        largest = max(largest, abs(x[from + i]));
    }
    const float scale = largest / 127.0;
    float inverse = 1.0 / scale;
    if (!(scale > 0.0) || isinf(inverse)) {
        inverse = 0.0;
    }
    uint sum = 0;
    for (uint word = 0; word < 8; word++) {
        uint packed = 0;
        for (uint i = 0; i < 4; i++) {
            const float y = x[from + 4 * word + (i ^ 2)] * inverse;
            const uint code = uint(int(y + (y < 0.0 ? -0.5 : 0.5)) + 128);
            packed |= code << (8 * i);
            sum += code;
        }
        result[to + word] = packed;
    }
    result[to + 8] = floatBitsToUint(scale);
    result[to + 9] = sum;
}
