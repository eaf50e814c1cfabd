// copy_words: moves 32-bit words between buffers; how a runtime fills and reads memory the host cannot see.
//
// source       uint [any]      read from `span.from`
// destination  uint [any]      written from `span.to`
// span         uint [3]        from, to, count: in words; a buffer the host rewrites between runs of one recording
#version 450

layout(local_size_x = 64) in;

layout(std430, binding = 0) readonly buffer Source { uint source[]; };
layout(std430, binding = 1) writeonly buffer Destination { uint destination[]; };
layout(std430, binding = 2) readonly buffer Span { uint span[]; };

void main() {
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < span[2]; i += stride) {
        destination[span[1] + i] = source[span[0] + i];
    }
}
